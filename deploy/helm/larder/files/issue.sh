#!/bin/sh
# Issues a process's certificate from the authority that the chart made, whenever its pod starts.
#
#   issue.sh ROLE NAME AUTHORITY TLS
#
# AUTHORITY and TLS are folders. AUTHORITY has the authority's ca.pem and ca.key; TLS gets the files that the process reads.
set -eu
role=$1 name=$2 authority=$3 tls=$4

# A container that is started again finds the files of its former start. Copies of a Secret's files are read-only, hence -f.
rm -rf "$tls/issued"
larder ca issue "$role" "$name" --dir "$authority" --out "$tls/issued"
cp -f "$authority/ca.pem" "$tls/ca.crt"
mv "$tls/issued/$name.pem" "$tls/tls.crt"
mv "$tls/issued/$name.key" "$tls/tls.key"
rmdir "$tls/issued"
