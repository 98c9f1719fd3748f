#!/bin/bash
# First process of a node: its own PID, UTS, IPC, mount and network namespaces.
# usage: node.sh NAME LABDIR SHARED_TMP
set -eu
name=$1 dir=$2 shared_tmp=$3
hostname "$name"
# Nodes of a cluster share neither memory nor /tmp
mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm
if [ "$shared_tmp" = no ]; then
    mount --bind "$dir/nodes/$name/tmp" /tmp
fi
slurmd -D -N "$name" -f "$dir/etc/slurm.conf" &
# The node ends with its slurmd, and every process on it too
wait $!
