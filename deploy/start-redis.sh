#!/bin/sh
# Start Redis with redis.conf and the users of users.acl; arguments go to the server.
#
# A user's password is in PASSWORD_<USER>, for example PASSWORD_WORKER; a user without one cannot
# log in. CLIENTS="ann bob" makes more users like `client`, each for the client names ann and
# ann-*, with PASSWORD_ANN and so on. PASSWORD_DEFAULT lets the user `default` do everything: for
# whoever keeps this Redis.
#
# GATEWAY_BATCHES=on adds to the rights of `gateway` those of the line `gateway-batches`, which is no user:
# files and batches by HTTP need RQ's keys.
#
# SERVER is the program, redis-server where not given. FOLDER is where users.acl and a copy of
# redis.conf are written. A copy that is there is left as it is: Sentinels write into it who is whose
# replica, so give a FOLDER that stays where they watch.
set -eu
here=$(dirname "$0")

umask 077
folder=${FOLDER:-$(mktemp -d)}
mkdir -p "$folder"

password_of() {
    printenv "PASSWORD_$(echo "$1" | tr 'a-z-' 'A-Z_')" | tr -d '\n'
}

hash_of() {
    password_of "$1" | sha256sum | cut -c 1-64
}

clients() {
    for name in ${CLIENTS:-}; do
        sed -n "/^user client /s/\([: ]\)client\([ /-]\)/\1$name\2/gp" "$here/users.acl"
    done
}

# What a user may beside its own line.
more_for() {
    if [ "$1" = gateway ] && [ "${GATEWAY_BATCHES:-}" = on ]; then
        sed -n 's/^user gateway-batches off//p' "$here/users.acl"
    fi
}

{ grep -v '^user gateway-batches ' "$here/users.acl"; clients; } | while read -r _ name state rights; do
    rights="$rights$(more_for "$name")"
    if [ -z "$(password_of "$name")" ]; then
        echo "user $name off $rights"
    elif [ "$name" = default ]; then
        echo "user default on #$(hash_of default) ~* &* +@all"
    else
        echo "user $name $state #$(hash_of "$name") $rights"
    fi
done >"$folder/users.acl"
[ -e "$folder/redis.conf" ] || cp "$here/redis.conf" "$folder/redis.conf"

exec "${SERVER:-redis-server}" "$folder/redis.conf" --aclfile "$folder/users.acl" "$@"
