#!/bin/bash
# Slurm epilog: end what the finished job has left on this node, and drain the node when GPU memory does not come back.
#
#   slurm.conf:  Epilog=/etc/slurm/epilog.d/*      (a copy of this file there, root's, mode 0755; then scontrol reconfigure)
#
# Runs as root on every node of a job when the job, or an attempt that is requeued, has ended there. A process is ended
# when it is the job's user's AND its environment, which children inherit, says that slurmd started it on this node for
# this very job. Never by name, never all of a user's: other jobs, logins and notebooks are left alone. When no process
# of the user is left at all, the shared memory and temporary files that torch, NCCL and Python make go too.
# Without a GPU driver the GPU part does nothing. Exit code 0 always: a non-zero one would drain without a reason.
# Source: slurm.conf(5) "Epilog"; Slurm's "Prolog and Epilog Guide" (variables); proc(5).
set -u -o pipefail
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C

readonly term_wait_s=3 # from SIGTERM to SIGKILL: the job has had KillWait before
readonly kill_wait_s=5 # for the kernel to take the killed ones away
readonly gpu_wait_s=${HPC_EPILOG_GPU_WAIT_S:-30} # for the driver to take their memory back
readonly gpu_free_mib=1024

job=${SLURM_JOB_ID:-} uid=${SLURM_JOB_UID:-} node=${SLURMD_NODENAME:-}
if [[ ! $job =~ ^[0-9]+$ || ! $uid =~ ^[0-9]+$ || -z $node ]]; then
    echo "epilog: SLURM_JOB_ID='$job' SLURM_JOB_UID='$uid' SLURMD_NODENAME='$node': to be run by slurmd" >&2
    exit 0
fi
[[ $uid -ge ${HPC_EPILOG_MIN_UID:-1000} ]] || exit 0 # never a system's user

# "PID START" of each process of the user that bears the job's mark; a start time makes a process id unmistakable.
leftovers() {
    local pid environ
    for pid in $(pgrep -U "$uid"); do
        mapfile -d '' -t environ 2>/dev/null <"/proc/$pid/environ" || continue
        has "SLURM_JOB_ID=$job" || continue
        has "SLURMD_NODENAME=$node" || continue
        [[ -z ${SLURM_CLUSTER_NAME:-} ]] || has "SLURM_CLUSTER_NAME=$SLURM_CLUSTER_NAME" || continue
        start_of "$pid" && echo "$pid $started"
    done
}
has() { # has ENTRY: exactly this one is in the environment that was read last
    local entry
    for entry in "${environ[@]}"; do [[ $entry != "$1" ]] || return 0; done
    return 1
}
start_of() { # sets started, in clock ticks after boot; fails for a process that has ended (Z, X)
    local line words
    read -r line 2>/dev/null <"/proc/$1/stat" || return 1
    read -r -a words <<<"${line##*) }"
    started=${words[19]}
    [[ ${words[0]} != [ZX] ]]
}
signal_all() { # signal_all NAME: to each leftover, if its number is still its own
    local pid seen
    while read -r pid seen; do
        start_of "$pid" || continue
        [[ $started == "$seen" ]] || continue
        kill -s "$1" "$pid" 2>/dev/null && ended[$pid]=$started
    done < <(leftovers)
}
until_none() { # until_none SECONDS
    local deadline=$((SECONDS + $1))
    while [[ -n $(leftovers) ]]; do
        [[ $SECONDS -lt $deadline ]] || return 1
        sleep 0.2
    done
}

declare -A ended=()
signal_all TERM
if [[ ${#ended[@]} -gt 0 ]]; then
    signal_all CONT # a stopped one hears nothing else
    if ! until_none "$term_wait_s"; then
        signal_all KILL
        until_none "$kill_wait_s" || true
    fi
    logger -t hpc-epilog "job $job of user $uid on $node: ended ${#ended[@]} leftover processes: ${!ended[*]}" 2>/dev/null
fi

if ! pgrep -U "$uid" >/dev/null; then # by user id, to see that nobody is there
    find /dev/shm -maxdepth 1 -type f -uid "$uid" -regextype posix-extended \
        -regex '.*/(torch_[0-9]+_[0-9]+_[0-9]+|nccl-[A-Za-z0-9]{6}|sem\.[^/]+|psm_[A-Za-z0-9_]+|cuda\.shm\.[0-9a-f.]+|__KMP_REGISTERED_LIB_[0-9_]+)' \
        -delete 2>/dev/null
    find /tmp /var/tmp -maxdepth 1 -type d -uid "$uid" -regextype posix-extended \
        -regex '.*/(pymp-[a-z0-9_]{8}|torch-shm-dir-[A-Za-z0-9]{6}|torchelastic_[a-z0-9_]{8}|hpc-[0-9]+-[^/]*)' \
        -exec rm -rf --one-file-system -- {} + 2>/dev/null
fi

gpus=${SLURM_JOB_GPUS:-}
smi=${HPC_EPILOG_NVIDIA_SMI:-nvidia-smi}
if [[ $gpus =~ ^[0-9]+(,[0-9]+)*$ ]] && command -v "$smi" >/dev/null; then
    held() { # the job's GPUs whose memory has not come back, as "GPU 2: 40960 MiB"
        timeout 20 "$smi" -i "$gpus" --query-gpu=index,memory.used --format=csv,noheader,nounits |
            awk -F ', *' -v free="$gpu_free_mib" '$2 >= free { printf "%sGPU %s: %s MiB", sep, $1, $2; sep = ", " }'
    }
    deadline=$((SECONDS + gpu_wait_s)) left='nvidia-smi gives no answer'
    while left=$(held) || left='nvidia-smi gives no answer'; [[ -n $left ]]; do
        if [[ $SECONDS -ge $deadline ]]; then
            scontrol update "nodename=$node" state=drain "reason=epilog of job $job: memory in use after it, $left"
            break
        fi
        sleep 1
    done
fi
exit 0
