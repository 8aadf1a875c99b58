"""XLA flags for the processes of all tests."""


def xla_flags(num_devices: int) -> str:
    """Return flags for a CPU that is split into devices and compiles fast.

    Most of the suite's time is compilation of programs that run once. Without LLVM's
    optimizations and the fusion emitters they compile two to three times as fast, and
    compute the same to rounding.
    """
    return " ".join(
        [
            f"--xla_force_host_platform_device_count={num_devices}",
            "--xla_backend_optimization_level=0",
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",  # tests fill all cores
            # With a schedule for concurrency, devices may start a program's collectives
            # in different orders and wait for each other forever.
            "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        ]
    )
