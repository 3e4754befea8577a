#!/bin/sh
# Start Redis with redis.conf and the users of users.acl; arguments go to the server.
#
# A user's password is in PASSWORD_<USER>, for example PASSWORD_WORKER; a user without one cannot
# log in. CLIENTS="ann bob" makes more users like `client`, each for the client names ann and
# ann.*, with PASSWORD_ANN and so on. PASSWORD_DEFAULT lets the user `default` do everything: for
# whoever keeps this Redis. SERVER is the program, redis-server where not given; USERS_FILE is where
# the users are written.
set -eu
here=$(dirname "$0")
umask 077
users=${USERS_FILE:-$(mktemp -d)/users.acl}

password_of() {
    printenv "PASSWORD_$(echo "$1" | tr 'a-z-' 'A-Z_')" | tr -d '\n'
}

hash_of() {
    password_of "$1" | sha256sum | cut -c 1-64
}

clients() {
    for name in ${CLIENTS:-}; do
        sed -n "/^user client /s/\([: ]\)client\([ ./]\)/\1$name\2/gp" "$here/users.acl"
    done
}

{ cat "$here/users.acl"; clients; } | while read -r _ name state rights; do
    if [ -z "$(password_of "$name")" ]; then
        echo "user $name off $rights"
    elif [ "$name" = default ]; then
        echo "user default on #$(hash_of default) ~* &* +@all"
    else
        echo "user $name $state #$(hash_of "$name") $rights"
    fi
done >"$users"

exec "${SERVER:-redis-server}" "$here/redis.conf" --aclfile "$users" "$@"
