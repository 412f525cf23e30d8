#!/bin/sh
# The first process of a machine (tests/support/machines.py), in mount, process and network namespaces of its own:
# gives it a home and a /tmp of its own and then runs what is asked for.
#
# machine.sh DIRECTORY KEPT COMMAND …    KEPT: paths that must be seen below /tmp and /root too, one per line
set -eu
directory=$1 kept=$2
shift 2

cover() { # $1: a directory; $2: what is there from now on
    printf '%s\n' "$kept" | while read -r path; do
        case $path in "$1"/*)
            mkdir -p "$2/${path#"$1"/}"
            mount --rbind "$path" "$2/${path#"$1"/}"
            ;;
        esac
    done
    mount --rbind "$2" "$1"
}

cover /tmp "$directory/tmp"
cover /root "$directory/root"
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount -t tmpfs tmpfs /dev/shm
cd /
exec "$@"
