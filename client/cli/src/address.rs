//! The address of a server, as people write it: a name or an IP address, with or without a port.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// A host and a port. Each request resolves the host's name again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    /// Reads `HOST` or `HOST:PORT`. Without a port, `usual_port` is the port.
    ///
    /// # Errors
    /// A sentence that says what would be right.
    pub(crate) fn parse(text: &str, usual_port: u16) -> Result<Self, String> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(Self::from(address));
        }
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return Ok(Self::from(SocketAddr::new(ip, usual_port)));
        }
        let (host, port) = match text.split_once(':') {
            None => (text, Some(usual_port)),
            Some((host, port)) => (host, port.parse().ok().filter(|&port| port > 0)),
        };
        let is_name = !host.is_empty()
            && host.len() <= MAX_NAME
            && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        let wrong = || format!("write HOST or HOST:PORT, such as larder.example:{usual_port}");
        match port {
            Some(port) if is_name => Ok(Self { host: host.to_owned(), port }),
            _ => Err(wrong()),
        }
    }

    /// A coordinator's address.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub(crate) fn of_coordinator(text: &str) -> Result<Self, String> {
        Self::parse(text, COORDINATOR_PORT)
    }

    /// A node's address.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub(crate) fn of_node(text: &str) -> Result<Self, String> {
        Self::parse(text, NODE_PORT)
    }
}

/// All coordinators of a cluster: any coordinator answers, and the leader has the newest state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Coordinators(Vec<HostPort>);

impl Coordinators {
    /// Reads addresses of coordinators with commas between them.
    ///
    /// # Errors
    /// As [`HostPort::parse`].
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        text.split(',').map(|one| HostPort::of_coordinator(one.trim())).collect::<Result<_, _>>().map(Self)
    }

    /// Each address.
    pub(crate) fn each(&self) -> impl Iterator<Item = &HostPort> {
        self.0.iter()
    }
}

impl From<SocketAddr> for Coordinators {
    fn from(address: SocketAddr) -> Self {
        Self(vec![address.into()])
    }
}

impl fmt::Display for Coordinators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&all.join(","))
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        let host = match address.ip() {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        Self { host, port: address.port() }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The ports on which servers listen by default.
const COORDINATOR_PORT: u16 = 7600;
const NODE_PORT: u16 = 9440;

/// Most bytes of a name in DNS.
const MAX_NAME: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ip_addresses_are_read_with_and_without_a_port() {
        for (text, read) in [
            ("larder.example", "larder.example:7600"),
            ("larder-coordinator.larder.svc:81", "larder-coordinator.larder.svc:81"),
            ("10.0.0.1", "10.0.0.1:7600"),
            ("10.0.0.1:7", "10.0.0.1:7"),
            ("::1", "[::1]:7600"),
            ("[::1]", "[::1]:7600"),
            ("[::1]:7", "[::1]:7"),
        ] {
            assert_eq!(HostPort::of_coordinator(text).unwrap().to_string(), read);
        }
        assert_eq!(Coordinators::parse("a, b:1,::1").unwrap().to_string(), "a:7600,b:1,[::1]:7600");
        assert!(Coordinators::parse("a,").is_err() && Coordinators::parse("").is_err());
        assert_eq!(HostPort::of_node("a").unwrap().to_string(), "a:9440");
    }

    #[test]
    fn anything_else_is_refused_with_what_would_be_right() {
        let long = "a".repeat(254);
        for text in ["", ":1", "a:", "a:0", "a:65536", "a:b", "a:1:2", "http://a:1", "a b", "a/b", "ä", &long]
        {
            let error = HostPort::of_coordinator(text).unwrap_err();
            assert_eq!(error, "write HOST or HOST:PORT, such as larder.example:7600", "{text}");
        }
    }
}
