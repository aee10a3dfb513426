"""The op stays where it is, whatever lowers the rest: with every partitioner of the wheel that needs nothing beside the wheel."""

import importlib

import pytest
import torch
from conftest import model

import kvist.executorch as ke

PARTITIONERS = {
    "XnnpackBackend": "executorch.backends.xnnpack.partition.xnnpack_partitioner.XnnpackPartitioner",
    "VulkanBackend": "executorch.backends.vulkan.partitioner.vulkan_partitioner.VulkanPartitioner",
    "WebGPU": "executorch.backends.webgpu.partitioner.partitioner.WebGPUPartitioner",
    "NativeBackend": "executorch.backends.native.partitioner.NativePartitioner",
    "ExampleBackend": "executorch.backends.example.example_partitioner.ExamplePartitioner",
}


def test_without_a_partitioner(tmp_path, alone):
    """The portable kernels, and the same logits."""
    ke.export(model(), tmp_path / "model.pte", xnnpack=False, max_step_tokens=16)
    program = ke.Program(tmp_path / "model.pte")
    session = ke.make_decode_session("kvist", ke.make_config(program.cache_params, 16, torch.float32))
    logits, *_ = program.run(session, [5, 17, 3], range(3), range(3))
    torch.testing.assert_close(logits, alone([5, 17, 3]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", PARTITIONERS)
def test_every_layer_keeps_its_call(tmp_path, backend):
    from executorch.runtime import Runtime

    module, name = PARTITIONERS[backend].rsplit(".", 1)
    partitioner = getattr(importlib.import_module(module), name)()
    path = tmp_path / "model.pte"
    assert ke.export(model(num_hidden_layers=1), path, max_step_tokens=16, partitioners=[partitioner]) == 1
    # WebGPU's programs are Vulkan's.
    delegate = "VulkanBackend" if backend == "WebGPU" else backend
    assert delegate.encode() in path.read_bytes()
    if delegate in Runtime.get().backend_registry.registered_backend_names:
        ke.Program(path)
    else:
        with pytest.raises(RuntimeError):
            ke.Program(path)
