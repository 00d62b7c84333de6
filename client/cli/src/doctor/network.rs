//! The network: socket buffers, batches, and the packet sizes on the paths to others.

use std::net::SocketAddr;

use larder_net::quic::TransportSettings;

use super::probes::Target;
use super::{Finding, Subject, note, ok, problem, warning};
use crate::output::bytes;

pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings = vec![buffers(subject), segmentation(subject)];
    if subject.probes.targets.is_empty() {
        let advice =
            "name peers with --peer, or a coordinator with --coordinator, to check the paths to them";
        findings.push(note(MTU, "no address is named", advice));
    }
    findings.extend(subject.probes.targets.iter().map(|target| path(subject, target)));
    findings
}

fn buffers(subject: &Subject) -> Finding {
    const CHECK: &str = "UDP buffers";
    let wanted = TransportSettings::default().socket_buffer_bytes as u64;
    let [receive, send] =
        ["r", "w"].map(|which| subject.files.number(&format!("proc/sys/net/core/{which}mem_max")));
    // A container with a network namespace of its own does not see the limits. The buffer that a socket got tells them.
    let Some(most) =
        receive.zip(send).map(|(receive, send)| receive.min(send)).or(subject.probes.udp_buffer_bytes)
    else {
        return note(
            CHECK,
            "the system does not say how large they may be",
            "check net.core.rmem_max on the host",
        );
    };
    if most < wanted {
        let found = format!("{} at most, QUIC asks for {}: packets will be lost", bytes(most), bytes(wanted));
        let advice = format!(
            "`sysctl net.core.rmem_max={wanted} net.core.wmem_max={wanted}`, on the host of a container"
        );
        return warning(CHECK, found, advice);
    }
    ok(CHECK, format!("{} at most, QUIC asks for {}", bytes(most), bytes(wanted)))
}

fn segmentation(subject: &Subject) -> Finding {
    const CHECK: &str = "GSO";
    match subject.probes.gso_segments {
        0 | 1 => warning(
            CHECK,
            "the kernel takes datagrams one by one: a third of the rate for three times the work",
            "use Linux 4.18 or newer, and a sandbox that passes UDP_SEGMENT",
        ),
        segments => ok(CHECK, format!("{segments} datagrams a call")),
    }
}

/// Checks the path to one address: the interface's MTU, and the packets that pass the path.
fn path(subject: &Subject, Target { name, address, path_mtu }: &Target) -> Finding {
    let address = match address {
        Ok(address) => *address,
        Err(error) => {
            let advice = "check the name in [cluster] coordinator, or give an address";
            return problem(MTU, format!("{name} cannot be found: {error}"), advice);
        }
    };
    let Some(interface) = subject.host.interface_to(address.ip()) else {
        return problem(
            MTU,
            format!("no route leads to {name}"),
            "check the address, and `ip route get` for it",
        );
    };
    let own =
        subject.host.interfaces.get(interface).map_or(0, |interface| interface.mtu.min(MOST_PACKET_BYTES));
    let carried = path_mtu.unwrap_or(own).min(own);
    let headers = headers(address);
    let wanted =
        subject.config.cluster.as_ref().map_or(DEFAULT_DATAGRAM_BYTES, |cluster| cluster.max_datagram_bytes);
    let wanted = u32::from(wanted) + headers;
    let to = format!("{interface} to {name} carries packets of {carried} bytes");
    if carried < LEAST_DATAGRAM_BYTES + headers {
        let advice = "raise the MTU of the path to 1,280 or more: QUIC needs that";
        return problem(MTU, to, advice);
    }
    if carried < own {
        let advice = format!(
            "set the same MTU everywhere on the way: the interface has {own}, and packets that are too large for the path get lost"
        );
        return warning(MTU, to, advice);
    }
    let is_over_tcp = subject.config.cluster.as_ref().is_some_and(|cluster| cluster.blocks_over_tcp);
    if carried < wanted && !is_over_tcp {
        let datagram = carried - headers;
        let advice = format!(
            "jumbo frames (MTU 9000) on the whole way more than double the rate of datagrams of {datagram}; without them, set cluster.blocks_over_tcp = true"
        );
        return note(MTU, to, advice);
    }
    ok(MTU, to)
}

/// Bytes of the headers of IP and UDP.
pub(super) fn headers(address: SocketAddr) -> u32 {
    if address.is_ipv4() { 28 } else { 48 }
}

const MTU: &str = "MTU";

/// Every path of QUIC carries these (RFC 9000, section 14).
const LEAST_DATAGRAM_BYTES: u32 = 1_200;

/// The configuration's default, without a cluster.
const DEFAULT_DATAGRAM_BYTES: u16 = 8_900;

/// The largest packet of IP, whatever an interface takes.
const MOST_PACKET_BYTES: u32 = 65_535;
