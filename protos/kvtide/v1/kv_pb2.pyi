from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvHandle(_message.Message):
    __slots__ = ("engine_id", "request_id", "side_channel_host", "side_channel_port", "tensor_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size", "block_groups", "token_count", "block_size_tokens", "engine_clock_expiry_s", "extension_json")
    class ExtensionJsonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_HOST_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_PORT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CLOCK_EXPIRY_S_FIELD_NUMBER: _ClassVar[int]
    EXTENSION_JSON_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    side_channel_host: str
    side_channel_port: int
    tensor_parallel_size: int
    decode_context_parallel_size: int
    pipeline_parallel_size: int
    block_groups: _containers.RepeatedCompositeFieldContainer[BlockRuns]
    token_count: int
    block_size_tokens: int
    engine_clock_expiry_s: float
    extension_json: _containers.ScalarMap[str, str]
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., side_channel_host: _Optional[str] = ..., side_channel_port: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., decode_context_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., block_groups: _Optional[_Iterable[_Union[BlockRuns, _Mapping]]] = ..., token_count: _Optional[int] = ..., block_size_tokens: _Optional[int] = ..., engine_clock_expiry_s: _Optional[float] = ..., extension_json: _Optional[_Mapping[str, str]] = ...) -> None: ...

class BlockRuns(_message.Message):
    __slots__ = ("first_id_deltas", "run_lengths")
    FIRST_ID_DELTAS_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    first_id_deltas: _containers.RepeatedScalarFieldContainer[int]
    run_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_id_deltas: _Optional[_Iterable[int]] = ..., run_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixFingerprint(_message.Message):
    __slots__ = ("algorithm", "block_size_tokens", "token_count", "digests")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    block_size_tokens: int
    token_count: int
    digests: bytes
    def __init__(self, algorithm: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., token_count: _Optional[int] = ..., digests: _Optional[bytes] = ...) -> None: ...
