#!/bin/bash
# Submits a batch script, held, and prepares its job directory; prints sbatch's words and
# then "Submitted batch job ID". Runs on the submitting machine, in place of vec-inf's
# bare sbatch: vec-inf takes any stderr for a failure and the last word for the id, so a
# warning or a banner would lose a queued job.
#
# usage: submit.sh SCRIPT JOB_DIR_PREFIX 3>&2      (job directory: JOB_DIR_PREFIX.ID)
set -u

script=$1
prefix=$2

# A hub that runs in a Slurm job: none of that job's variables may become an option.
# Where the cluster is stays known.
for name in "${!SLURM_@}" "${!SRUN_@}"; do
    case $name in
        SLURM_CONF | SLURM_CONF_SERVER | SLURM_CLUSTERS | SLURM_JWT) ;;
        *) unset "$name" ;;
    esac
done

words=$(sbatch --hold "$script" 2>&1)
status=$?
id=$(printf '%s\n' "$words" | sed -n -E 's/.*Submitted batch job ([0-9]+).*/\1/p' | tail -n 1)
if [ "$status" -ne 0 ] || [ -z "$id" ]; then
    printf '%s\n' "${words:-sbatch ended with status $status and no message}" >&3
    exit 1
fi

directory=$prefix.$id
mkdir -p -- "$directory"
# before vec-inf writes the deployment's env into it
json=$directory/${directory##*/}.json
rm -f -- "$json"
(umask 077 && set -C && : >"$json")
printf '%s\nSubmitted batch job %s\n' "$words" "$id"
