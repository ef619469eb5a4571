from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ROLE_UNSPECIFIED: _ClassVar[NodeRole]
    NODE_ROLE_PREFILL: _ClassVar[NodeRole]
    NODE_ROLE_DECODE: _ClassVar[NodeRole]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_STARTING: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_SUSPECT: _ClassVar[NodeState]
    NODE_STATE_DOWN: _ClassVar[NodeState]
NODE_ROLE_UNSPECIFIED: NodeRole
NODE_ROLE_PREFILL: NodeRole
NODE_ROLE_DECODE: NodeRole
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_STARTING: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_SUSPECT: NodeState
NODE_STATE_DOWN: NodeState

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "epoch", "role", "engine_url", "models", "vllm_version", "block_size_tokens", "block_count", "kv_recompute_threshold_tokens", "decoder_kv_blocks_ttl_ms", "max_model_len_tokens")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_URL_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_RECOMPUTE_THRESHOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODER_KV_BLOCKS_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: str
    role: NodeRole
    engine_url: str
    models: _containers.RepeatedScalarFieldContainer[str]
    vllm_version: str
    block_size_tokens: int
    block_count: int
    kv_recompute_threshold_tokens: int
    decoder_kv_blocks_ttl_ms: int
    max_model_len_tokens: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[str] = ..., role: _Optional[_Union[NodeRole, str]] = ..., engine_url: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., vllm_version: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., block_count: _Optional[int] = ..., kv_recompute_threshold_tokens: _Optional[int] = ..., decoder_kv_blocks_ttl_ms: _Optional[int] = ..., max_model_len_tokens: _Optional[int] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("free_blocks", "pinned_blocks", "running_requests", "waiting_requests", "last_step_age_ms")
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    free_blocks: int
    pinned_blocks: int
    running_requests: int
    waiting_requests: int
    last_step_age_ms: int
    def __init__(self, free_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., last_step_age_ms: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("info", "load", "http_serving")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HTTP_SERVING_FIELD_NUMBER: _ClassVar[int]
    info: NodeInfo
    load: NodeLoad
    http_serving: bool
    def __init__(self, info: _Optional[_Union[NodeInfo, _Mapping]] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., http_serving: bool = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("report_interval_ms",)
    REPORT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    report_interval_ms: int
    def __init__(self, report_interval_ms: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("info", "state", "load", "silent_ms")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    info: NodeInfo
    state: NodeState
    load: NodeLoad
    silent_ms: int
    def __init__(self, info: _Optional[_Union[NodeInfo, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., silent_ms: _Optional[int] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class WatchNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...
