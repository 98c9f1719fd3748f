# shellcheck shell=bash
# Functions that the batch script and the rank script share. Does nothing by itself.

# Prints "NAME ADDRESS/LENGTH" for each interface named exactly PREFIX<digits> that has
# a routable IPv4, lowest number first. A VLAN child (hsn0.561) is another network.
llmhub_fabric() { # PREFIX
    ip -4 -o addr show | awk -v prefix="$1" '
        {
            name = $2
            sub(/@.*/, "", name)
            number = substr(name, length(prefix) + 1)
            if (substr(name, 1, length(prefix)) != prefix || number !~ /^[0-9]+$/) next
            for (i = 3; i < NF; i++) if ($i == "inet") address = $(i + 1)
            if (address ~ /^(127|169\.254)\./ || seen[name]++) next
            print number, name, address
        }' | sort -n -k 1,1 | cut -d " " -f 2-
}

# Keeps the environment that this script was given, apart from its own variables.
llmhub_read_env() {
    local entry
    declare -g -A LLMHUB_ENV=()
    while IFS= read -r -d '' entry; do
        LLMHUB_ENV[${entry%%=*}]=${entry#*=}
    done < <(env -0)
}

# Expands $NAME and ${NAME} in VALUE from the environment, and nothing else; the result
# is in REPLY.
llmhub_expand() { # VALUE
    local rest=$1 done='' name
    # shellcheck disable=SC2016 # a pattern that holds $, not an expansion
    local reference='\$(\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))'
    while [[ $rest =~ $reference ]]; do
        name=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
        done+=${rest%%"${BASH_REMATCH[0]}"*}${LLMHUB_ENV[$name]-}
        rest=${rest#*"${BASH_REMATCH[0]}"}
    done
    REPLY=$done$rest
}

# A pipe that nothing writes to, for llmhub_nap.
llmhub_open_nap() {
    exec {LLMHUB_NAP}<> <(:)
}

# Waits without a process of its own.
llmhub_nap() { # SECONDS
    read -r -t "$1" -u "$LLMHUB_NAP" _ || true
}
