//! Steers packets to the sockets of one UDP address, by a program of the classic packet filter.
#![expect(unsafe_code, reason = "the filter is handed to the kernel by its address")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use libc::{
    BPF_ABS, BPF_ADD, BPF_ALU, BPF_B, BPF_JA, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_MISC, BPF_MOD,
    BPF_RET, BPF_SUB, BPF_TAX, BPF_X, BPF_XOR, c_void, sock_filter, sock_fprog, socklen_t,
};

/// Hands each packet of the sockets that share `socket`'s address to the socket that its connection id names. The sockets are
/// numbered in the order in which they were bound.
///
/// An id's first byte is a share's number, and the second byte of this process's own ids is [`check_of`] the first. Number 0 names
/// socket 0. Other numbers name the other sockets in turn, so that a client need not know how many there are. A packet that is too
/// short goes to socket 0, as does a packet with a long header whose id does not have `id_bytes` bytes, and a short header without
/// the check: it is a stateless reset, whose bytes are random, and connections that this address dialled are socket 0's. RFC 8999
/// has the layout of both headers.
///
/// # Errors
/// Fails if the system has no such filters.
pub(super) fn steer_by_connection_id(socket: &impl AsFd, sockets: u8, id_bytes: u8) -> io::Result<()> {
    let mut program = program(sockets, id_bytes);
    let filter = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the descriptor is open as long as `socket` is borrowed; `filter` has the size passed to the call, and its length is
    // that of `program`, which outlives the call. The kernel copies both.
    let attached = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast::<c_void>(),
            size_of::<sock_fprog>() as socklen_t,
        )
    };
    if attached == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The second byte of the id of a share.
pub(super) const fn check_of(share: u8) -> u8 {
    !share
}

/// The program. It reads a packet behind its UDP header; a read past the packet's end returns 0.
fn program(sockets: u8, id_bytes: u8) -> [sock_filter; 18] {
    let load = |at: u32| instruction(BPF_LD | BPF_B | BPF_ABS, at, [0, 0]);
    let jump = |test: u32, value: u32, [yes, no]: [u8; 2]| instruction(BPF_JMP | test, value, [yes, no]);
    let compute = |operation: u32, value: u32| instruction(BPF_ALU | operation | BPF_K, value, [0, 0]);
    let others = u32::from(sockets).saturating_sub(1).max(1);
    [
        load(0),
        // The first bit tells a long header.
        jump(BPF_JSET | BPF_K, 0x80, [7, 0]),
        load(1),
        compute(BPF_XOR, 0xff),
        instruction(BPF_MISC | BPF_TAX, 0, [0, 0]),
        load(2),
        jump(BPF_JEQ | BPF_X, 0, [0, 10]),
        load(1),
        jump(BPF_JA, 3, [0, 0]),
        load(5),
        jump(BPF_JEQ | BPF_K, id_bytes.into(), [0, 6]),
        load(6),
        jump(BPF_JEQ | BPF_K, 0, [4, 0]),
        compute(BPF_SUB, 1),
        compute(BPF_MOD, others),
        compute(BPF_ADD, 1),
        // The accumulator is the socket's number.
        instruction(BPF_RET | RETURN_ACCUMULATOR, 0, [0, 0]),
        instruction(BPF_RET | BPF_K, 0, [0, 0]),
    ]
}

fn instruction(code: u32, k: u32, [jt, jf]: [u8; 2]) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// `BPF_A` of the kernel's `bpf_common.h`.
const RETURN_ACCUMULATOR: u32 = 0x10;

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use rustix::net::sockopt::set_socket_reuseport;
    use socket2::{Domain, Socket, Type};

    use super::*;

    const ID_BYTES: u8 = 8;

    /// This many sockets of one address, steered.
    fn sockets(count: u8) -> Vec<UdpSocket> {
        let mut address = "127.0.0.1:0".parse().unwrap();
        let sockets: Vec<UdpSocket> = (0..count)
            .map(|_| {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
                set_socket_reuseport(&socket, true).unwrap();
                socket.bind(&std::net::SocketAddr::into(address)).unwrap();
                let socket = UdpSocket::from(socket);
                address = socket.local_addr().unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                socket
            })
            .collect();
        steer_by_connection_id(&sockets[0], count, ID_BYTES).unwrap();
        sockets
    }

    /// Sends a packet; returns the number of the socket that gets it.
    fn gets(sockets: &[UdpSocket], packet: &[u8]) -> usize {
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        from.send_to(packet, sockets[0].local_addr().unwrap()).unwrap();
        let mut bytes = [0; 64];
        loop {
            for (number, socket) in sockets.iter().enumerate() {
                socket.set_nonblocking(true).unwrap();
                if let Ok(length) = socket.recv(&mut bytes) {
                    assert_eq!(&bytes[..length], packet);
                    return number;
                }
            }
            std::thread::yield_now();
        }
    }

    fn short(share: u8) -> Vec<u8> {
        [&[0x40, share, check_of(share)][..], &[7; 29]].concat()
    }

    fn long(id_bytes: u8, share: u8) -> Vec<u8> {
        [&[0xc0, 0, 0, 0, 1, id_bytes, share][..], &[7; 30]].concat()
    }

    #[test]
    fn a_packet_goes_to_the_socket_that_its_connection_id_names() {
        let sockets = sockets(4);
        for share in 0..=9 {
            let expected = if share == 0 { 0 } else { 1 + (usize::from(share) - 1) % 3 };
            assert_eq!(gets(&sockets, &short(share)), expected, "a short header, share {share}");
            assert_eq!(gets(&sockets, &long(ID_BYTES, share)), expected, "a long header, share {share}");
        }
    }

    #[test]
    fn packets_of_those_who_name_no_share_go_to_the_first_socket() {
        let sockets = sockets(4);
        for id_bytes in [0, 4, 7, 9, 20] {
            assert_eq!(gets(&sockets, &long(id_bytes, 3)), 0, "an id of {id_bytes} bytes");
        }
        for packet in
            [&[][..], &[0x40], &[0x40, 3], &[0xc0], &[0xc0, 0, 0, 0, 1], &[0xc0, 0, 0, 0, 1, ID_BYTES]]
        {
            assert_eq!(gets(&sockets, packet), 0, "{packet:?}");
        }
    }

    #[test]
    fn a_stateless_reset_goes_to_the_first_socket_whatever_its_random_bytes_are() {
        let sockets = sockets(4);
        for byte in 0..=u8::MAX {
            let reset = [&[0x40, byte, check_of(byte) ^ 1][..], &[byte; 29]].concat();
            assert_eq!(gets(&sockets, &reset), 0, "{byte}");
        }
    }

    #[test]
    fn two_sockets_are_the_fewest_that_share() {
        let sockets = sockets(2);
        assert_eq!([0, 1, 2, 255].map(|share| gets(&sockets, &short(share))), [0, 1, 1, 1]);
    }
}
