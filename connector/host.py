"""What kind of vLLM is installed on this host, and what an engine needs to run on it.

Nothing here imports vLLM or torch: it reads which distributions are installed, so it costs no start-up time.
"""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# Two engines share the cores of one host. Without these, each binds threads to cores and spins on them.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}


def vllm_is_installed() -> bool:
    return find_spec("vllm") is not None


def runs_on_cpu() -> bool:
    """Whether vLLM's platform here is the CPU: vLLM itself tells by the same names."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        pass
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def device_variable() -> str:
    """The environment variable that says which accelerators a process may use."""
    return "ASCEND_RT_VISIBLE_DEVICES" if find_spec("torch_npu") else "CUDA_VISIBLE_DEVICES"


def check_devices(devices: tuple[int, ...]) -> None:
    """Raise ``ValueError`` in one sentence if engines here cannot have these accelerators."""
    if devices and runs_on_cpu():
        named = "+".join(map(str, devices))
        raise ValueError(
            f"devices={named} names accelerators, and vLLM runs on the CPU here; leave devices out"
        )
    if devices:
        device_environment(devices, os.environ)


def device_environment(devices: tuple[int, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Picks `devices` by their place among those that `environment` leaves visible."""
    variable = device_variable()
    visible = [name for name in environment.get(variable, "").split(",") if name]
    if not visible:
        return {variable: ",".join(map(str, devices))}
    beyond = [device for device in devices if device >= len(visible)]
    if beyond:
        raise ValueError(
            f"device {beyond[0]} is asked for, but {variable}={environment[variable]} leaves only "
            f"{len(visible)} visible; make more visible, or name others, as in devices=0+1"
        )
    return {variable: ",".join(visible[device] for device in devices)}
