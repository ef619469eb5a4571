"""The descriptors that the checked-in stubs carry."""

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from kvtide.v1 import kv_pb2, lease_pb2, node_pb2, router_pb2

MODULES = (kv_pb2, lease_pb2, node_pb2, router_pb2)


def current_descriptors() -> FileDescriptorSet:
    found = FileDescriptorSet()
    for module in MODULES:
        module.DESCRIPTOR.CopyToProto(found.file.add())
    return found
