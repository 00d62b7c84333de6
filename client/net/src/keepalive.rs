//! Finds out that the other end of an idle TCP connection is gone.

use std::os::fd::AsFd;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// Has the system probe the other end of a TCP connection while nothing comes, and end the connection if no probe is answered.
/// Otherwise a connection whose other end lost its power or its network would stay open for ever. Does nothing to other sockets.
pub fn probe_when_idle(socket: &impl AsFd) {
    let keepalive = TcpKeepalive::new().with_time(IDLE).with_interval(INTERVAL).with_retries(TRIES);
    // An error: it is no TCP socket.
    let _ = SockRef::from(socket).set_tcp_keepalive(&keepalive);
}

/// The silence before the first probe.
const IDLE: Duration = Duration::from_secs(30);

/// The time between two probes.
const INTERVAL: Duration = Duration::from_secs(10);

/// The number of probes without an answer that end the connection.
const TRIES: u32 = 3;

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::os::unix::net::UnixStream;

    use rustix::net::sockopt::{socket_keepalive, tcp_keepcnt, tcp_keepidle, tcp_keepintvl};

    use super::*;

    #[test]
    fn the_other_end_is_probed_after_half_a_minute_and_given_up_after_another() {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(!socket_keepalive(&socket).unwrap());
        probe_when_idle(&socket);
        assert!(socket_keepalive(&socket).unwrap());
        assert_eq!(tcp_keepidle(&socket).unwrap(), Duration::from_secs(30));
        let given_up = tcp_keepintvl(&socket).unwrap() * tcp_keepcnt(&socket).unwrap();
        assert_eq!(given_up, Duration::from_secs(30));
        // A socket without a network is left alone.
        probe_when_idle(&UnixStream::pair().unwrap().0);
    }
}
