#!/bin/sh
# Makes a host's configuration from the template that all hosts share: fills in name, zone, address, GPUs and certificate.
#
#   LARDER_NAME=NAME [LARDER_ZONE=ZONE] [LARDER_HOST_IP=IP] configure.sh TEMPLATE CONFIG [CERTIFICATES TLS]
#
# TEMPLATE, CONFIG, CERTIFICATES and TLS are folders. TEMPLATE/node.toml becomes CONFIG/node.toml. This host's files among all
# hosts' CERTIFICATES are copied to TLS.
set -eu
template=$1 config=$2 certificates=${3:-} tls=${4:-}
: "${LARDER_NAME:?the name of the node}"

address=${LARDER_HOST_IP:-}
case $address in *:*) address="[$address]" ;; esac
sed "s/@NAME@/$LARDER_NAME/; s/@HOST_IP@/$address/" "$template/node.toml" >"$config/node.toml"
# Before 1.35, Kubernetes does not tell pods their host's zone.
if [ -n "${LARDER_ZONE:-}" ] && ! grep -q "^zone = " "$config/node.toml"; then
    sed -i "s/^\[cluster\]\$/&\nzone = \"$LARDER_ZONE\"/" "$config/node.toml"
fi

if [ "${LARDER_GPUS:-}" = detect ]; then
    found=0
    for device in "${LARDER_SYS:-/sys}"/bus/pci/devices/*; do
        # NVIDIA's display controllers: 0x0300 with a display, 0x0302 without.
        [ "$(cat "$device/vendor")" = 0x10de ] || continue
        case $(cat "$device/class") in
        0x0300* | 0x0302*)
            printf '\n[[gpus]]\npci = "%s"\n' "${device##*/}" >>"$config/node.toml"
            found=$((found + 1))
            ;;
        esac
    done
    if [ "$found" = 0 ]; then
        echo "there is no NVIDIA GPU on the PCI bus of $LARDER_NAME" >&2
        exit 1
    fi
fi

if [ -n "$certificates" ]; then
    for file in ca.pem "$LARDER_NAME.pem" "$LARDER_NAME.key"; do
        if [ ! -f "$certificates/$file" ]; then
            echo "there is no $file in the Secret larder-node-certificates: deploy/kubernetes/certificates makes it" >&2
            exit 1
        fi
    done
    # A container that is started again finds its former copies, which are read-only.
    cp -f "$certificates/ca.pem" "$tls/ca.crt"
    cp -f "$certificates/$LARDER_NAME.pem" "$tls/tls.crt"
    (umask 077 && cp -f "$certificates/$LARDER_NAME.key" "$tls/tls.key")
fi
