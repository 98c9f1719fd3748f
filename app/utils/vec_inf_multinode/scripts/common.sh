# shellcheck shell=bash
# Functions that the batch script and the rank script share. Sets no state.

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

# Expands $NAME and ${NAME} in VALUE and nothing else; the result is in REPLY.
llmhub_expand() { # VALUE
    local llmhub_rest=$1 llmhub_done='' llmhub_name
    # shellcheck disable=SC2016 # a pattern that holds $, not an expansion
    local llmhub_reference='\$(\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))'
    while [[ $llmhub_rest =~ $llmhub_reference ]]; do
        llmhub_name=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
        llmhub_done+=${llmhub_rest%%"${BASH_REMATCH[0]}"*}${!llmhub_name-}
        llmhub_rest=${llmhub_rest#*"${BASH_REMATCH[0]}"}
    done
    REPLY=$llmhub_done$llmhub_rest
}

# A pipe that nothing writes to, for llmhub_nap.
llmhub_open_nap() {
    exec {LLMHUB_NAP}<> <(:)
}

# Waits without a process of its own.
llmhub_nap() { # SECONDS
    read -r -t "$1" -u "$LLMHUB_NAP" _ || true
}
