# shellcheck shell=bash
# What every stand-in of a compute node does: note how it was called, refuse the rest.

# Notes the argv, NUL after each item, in a file of this call's own.
record() { # NAME [ARGUMENT...]
    STUB_NAME=$1
    shift
    STUB_CALL=$STUB_LOG/$STUB_NAME.${SLURM_PROCID-batch}.$BASHPID
    : >"$STUB_CALL.argv"
    [ $# -eq 0 ] || printf '%s\0' "$@" >>"$STUB_CALL.argv"
}

# A stand-in that guesses would hide a call that the real command refuses.
refuse_call() { # [ARGUMENT...]
    printf 'stub %s: not known: %s\n' "$STUB_NAME" "$*" | tee -a -- "$STUB_LOG/refused" >&2
    exit 97
}
