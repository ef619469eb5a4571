from kvtide.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_HELD: _ClassVar[LeaseState]
    LEASE_STATE_CLAIMED: _ClassVar[LeaseState]
    LEASE_STATE_RELEASING: _ClassVar[LeaseState]
    LEASE_STATE_CONSUMED: _ClassVar[LeaseState]
    LEASE_STATE_RELEASED: _ClassVar[LeaseState]
    LEASE_STATE_EXPIRED: _ClassVar[LeaseState]
    LEASE_STATE_LOST: _ClassVar[LeaseState]

class LeaseEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_END_REASON_UNSPECIFIED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_CONSUMED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_EXPIRED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_SUPERSEDED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_CLOSED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_ENGINE_RESTARTED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_NOT_IN_INVENTORY: _ClassVar[LeaseEndReason]

class ReadOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_OUTCOME_UNSPECIFIED: _ClassVar[ReadOutcome]
    READ_OUTCOME_READ: _ClassVar[ReadOutcome]
    READ_OUTCOME_NOT_READ: _ClassVar[ReadOutcome]
    READ_OUTCOME_UNKNOWN: _ClassVar[ReadOutcome]

class LeaseEndCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_END_CAUSE_UNSPECIFIED: _ClassVar[LeaseEndCause]
    LEASE_END_CAUSE_READ: _ClassVar[LeaseEndCause]
    LEASE_END_CAUSE_EXPIRED: _ClassVar[LeaseEndCause]
    LEASE_END_CAUSE_RELEASED: _ClassVar[LeaseEndCause]
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_HELD: LeaseState
LEASE_STATE_CLAIMED: LeaseState
LEASE_STATE_RELEASING: LeaseState
LEASE_STATE_CONSUMED: LeaseState
LEASE_STATE_RELEASED: LeaseState
LEASE_STATE_EXPIRED: LeaseState
LEASE_STATE_LOST: LeaseState
LEASE_END_REASON_UNSPECIFIED: LeaseEndReason
LEASE_END_REASON_CONSUMED: LeaseEndReason
LEASE_END_REASON_EXPIRED: LeaseEndReason
LEASE_END_REASON_SUPERSEDED: LeaseEndReason
LEASE_END_REASON_CLOSED: LeaseEndReason
LEASE_END_REASON_ENGINE_RESTARTED: LeaseEndReason
LEASE_END_REASON_NOT_IN_INVENTORY: LeaseEndReason
READ_OUTCOME_UNSPECIFIED: ReadOutcome
READ_OUTCOME_READ: ReadOutcome
READ_OUTCOME_NOT_READ: ReadOutcome
READ_OUTCOME_UNKNOWN: ReadOutcome
LEASE_END_CAUSE_UNSPECIFIED: LeaseEndCause
LEASE_END_CAUSE_READ: LeaseEndCause
LEASE_END_CAUSE_EXPIRED: LeaseEndCause
LEASE_END_CAUSE_RELEASED: LeaseEndCause

class ConversationKey(_message.Message):
    __slots__ = ("tenant", "conversation_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    conversation_id: str
    def __init__(self, tenant: _Optional[str] = ..., conversation_id: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("conversation", "generation", "node_id", "epoch", "state", "end_reason", "token_count", "block_count", "time_left_ms")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    generation: int
    node_id: str
    epoch: str
    state: LeaseState
    end_reason: LeaseEndReason
    token_count: int
    block_count: int
    time_left_ms: int
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., generation: _Optional[int] = ..., node_id: _Optional[str] = ..., epoch: _Optional[str] = ..., state: _Optional[_Union[LeaseState, str]] = ..., end_reason: _Optional[_Union[LeaseEndReason, str]] = ..., token_count: _Optional[int] = ..., block_count: _Optional[int] = ..., time_left_ms: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("conversation", "grant_wait_ms")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    GRANT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    grant_wait_ms: int
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., grant_wait_ms: _Optional[int] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("generation", "claimed", "miss_reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    claimed: ClaimedLease
    miss_reason: str
    def __init__(self, generation: _Optional[int] = ..., claimed: _Optional[_Union[ClaimedLease, _Mapping]] = ..., miss_reason: _Optional[str] = ...) -> None: ...

class ClaimedLease(_message.Message):
    __slots__ = ("claim_id", "node_id", "handle", "fingerprint", "generation", "claim_time_left_ms", "ttl_ms")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    node_id: str
    handle: _kv_pb2.KvHandle
    fingerprint: _kv_pb2.PrefixFingerprint
    generation: int
    claim_time_left_ms: int
    ttl_ms: int
    def __init__(self, claim_id: _Optional[str] = ..., node_id: _Optional[str] = ..., handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., fingerprint: _Optional[_Union[_kv_pb2.PrefixFingerprint, _Mapping]] = ..., generation: _Optional[int] = ..., claim_time_left_ms: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("conversation", "generation", "claim_id", "read_outcome", "grant_expected")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    READ_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    GRANT_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    generation: int
    claim_id: str
    read_outcome: ReadOutcome
    grant_expected: bool
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., generation: _Optional[int] = ..., claim_id: _Optional[str] = ..., read_outcome: _Optional[_Union[ReadOutcome, str]] = ..., grant_expected: bool = ...) -> None: ...

class SettleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseConversationRequest(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ...) -> None: ...

class CloseConversationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLeaseRequest(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ...) -> None: ...

class GetLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("node_id", "tenant", "state", "page_size", "page_token")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    tenant: str
    state: LeaseState
    page_size: int
    page_token: str
    def __init__(self, node_id: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[_Union[LeaseState, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "inventory", "grants", "ended")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    inventory: EngineInventory
    grants: _containers.RepeatedCompositeFieldContainer[LeaseGrant]
    ended: _containers.RepeatedCompositeFieldContainer[LeaseEnded]
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., inventory: _Optional[_Union[EngineInventory, _Mapping]] = ..., grants: _Optional[_Iterable[_Union[LeaseGrant, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[LeaseEnded, _Mapping]]] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: str
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class EngineInventory(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[LeaseGrant]
    def __init__(self, held: _Optional[_Iterable[_Union[LeaseGrant, _Mapping]]] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("conversation", "generation", "handle", "fingerprint", "time_left_ms", "ttl_ms")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    generation: int
    handle: _kv_pb2.KvHandle
    fingerprint: _kv_pb2.PrefixFingerprint
    time_left_ms: int
    ttl_ms: int
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., generation: _Optional[int] = ..., handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., fingerprint: _Optional[_Union[_kv_pb2.PrefixFingerprint, _Mapping]] = ..., time_left_ms: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class LeaseEnded(_message.Message):
    __slots__ = ("request_id", "cause")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    cause: LeaseEndCause
    def __init__(self, request_id: _Optional[str] = ..., cause: _Optional[_Union[LeaseEndCause, str]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "releases")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    welcome: AttachWelcome
    releases: _containers.RepeatedCompositeFieldContainer[LeaseRelease]
    def __init__(self, welcome: _Optional[_Union[AttachWelcome, _Mapping]] = ..., releases: _Optional[_Iterable[_Union[LeaseRelease, _Mapping]]] = ...) -> None: ...

class AttachWelcome(_message.Message):
    __slots__ = ("inventory_interval_ms",)
    INVENTORY_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    inventory_interval_ms: int
    def __init__(self, inventory_interval_ms: _Optional[int] = ...) -> None: ...

class LeaseRelease(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...
