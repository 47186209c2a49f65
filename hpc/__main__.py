"""The console script: `hpc submit ...` is `python -m hpc.submit ...`, and so for every door."""

import importlib
import sys

DOORS = {
    "submit": ("hpc.submit", "send a training job to the cluster, or run it here with --local"),
    "status": ("hpc.status", "what happened to a run: attempts, causes, steps, and the share of time that ranks ran"),
    "logs": ("hpc.logs", "what the ranks of a run have printed, merged and followed; --errors: what went wrong"),
    "doctor": ("hpc.doctor", "what this cluster is and what of it will bite; --lint FILE: mistakes in a batch script"),
    "clean": ("hpc.clean", "what jobs that are over have left on this node, and an end to it"),
    "launch": ("hpc.launch", "the controller: start the job of this allocation (sbin/ddp.sbatch runs it)"),
    "node": ("hpc.node.__main__", "the agent: start this Slurm task's workers; --show prints their ranks"),
    "train": ("hpc.train.__main__", "the training core, under torchrun or alone"),
}


def main() -> int:
    """Run the door named by the first argument with the remaining ones."""
    if len(sys.argv) < 2 or sys.argv[1] not in DOORS:
        asked_for_help = len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help")
        stream = sys.stdout if asked_for_help else sys.stderr
        print("usage: hpc COMMAND ...\n", file=stream)
        for name, (_, purpose) in DOORS.items():
            print(f"  hpc {name:8} {purpose}", file=stream)
        return 0 if asked_for_help else 2
    name = sys.argv.pop(1)
    sys.argv[0] = f"hpc {name}"
    status: int = importlib.import_module(DOORS[name][0]).main(sys.argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
