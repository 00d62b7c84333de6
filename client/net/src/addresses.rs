//! Addresses in configuration files, for serde.

use std::fmt;
use std::net::SocketAddr;

use serde::Deserializer;
use serde::de::{self, Unexpected, Visitor};

/// Reads an IP address with a port. The error for any other value says how to write one.
///
/// # Errors
/// Fails if the value is no such address.
pub fn address<'de, D: Deserializer<'de>, A: From<SocketAddr>>(deserializer: D) -> Result<A, D::Error> {
    deserializer.deserialize_any(AddressVisitor).map(A::from)
}

struct AddressVisitor;

impl Visitor<'_> for AddressVisitor {
    type Value = SocketAddr;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "an IP address and a port, such as \"127.0.0.1:9440\" or \"[::1]:9440\", and no host name",
        )
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<SocketAddr, E> {
        text.parse().map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }
}
