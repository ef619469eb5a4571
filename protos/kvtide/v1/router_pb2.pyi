from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("model", "messages", "session_id", "max_tokens", "temperature", "parameters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    session_id: str
    max_tokens: int
    temperature: float
    parameters: _struct_pb2.Struct
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., session_id: _Optional[str] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("report", "text", "finish")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    report: TurnReport
    text: str
    finish: Finish
    def __init__(self, report: _Optional[_Union[TurnReport, _Mapping]] = ..., text: _Optional[str] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("model", "prompt", "session_id", "max_tokens", "temperature", "parameters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    session_id: str
    max_tokens: int
    temperature: float
    parameters: _struct_pb2.Struct
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., session_id: _Optional[str] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("report", "text", "finish")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    report: TurnReport
    text: str
    finish: Finish
    def __init__(self, report: _Optional[_Union[TurnReport, _Mapping]] = ..., text: _Optional[str] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class TurnReport(_message.Message):
    __slots__ = ("turn_id", "prefill_node_id", "decode_node_id", "prompt_tokens", "pulled_tokens", "cached_tokens", "recomputed_tokens", "reuse", "decoder_kv_blocks_ttl_ms", "kv_recompute_threshold_tokens")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    DECODER_KV_BLOCKS_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    KV_RECOMPUTE_THRESHOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    prefill_node_id: str
    decode_node_id: str
    prompt_tokens: int
    pulled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    reuse: str
    decoder_kv_blocks_ttl_ms: int
    kv_recompute_threshold_tokens: int
    def __init__(self, turn_id: _Optional[str] = ..., prefill_node_id: _Optional[str] = ..., decode_node_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., pulled_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., reuse: _Optional[str] = ..., decoder_kv_blocks_ttl_ms: _Optional[int] = ..., kv_recompute_threshold_tokens: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "prompt_tokens", "completion_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class RouterServiceCloseConversationRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class RouterServiceCloseConversationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
