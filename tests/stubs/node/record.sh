# shellcheck shell=bash
# What every stand-in of a compute node does: note how it was called, refuse the rest.

# Notes the argv, NUL after each item, in a file of this call's own.
record() { # NAME [ARGUMENT...]
    stub_name=$1
    shift
    stub_call=$STUB_LOG/$stub_name.${SLURM_PROCID-batch}.$BASHPID
    : >"$stub_call.argv"
    [ $# -eq 0 ] || printf '%s\0' "$@" >>"$stub_call.argv"
}

# A stand-in that guesses would hide a call that the real command refuses.
refuse_call() { # [ARGUMENT...]
    printf 'stub %s: not known: %s\n' "$stub_name" "$*" | tee -a -- "$STUB_LOG/refused" >&2
    exit 97
}
