//! Versions of the protocol between nodes, coordinators and admins.
//!
//! The handshake of a connection agrees on the latest version that both sides speak. Each side names its versions as ALPN
//! protocols `larder/N`, or `larder-blocks/N` on a connection that carries only fetches. A release speaks its own version and the
//! version before. After these, the accepting side accepts all other versions too: if the handshake agrees on such a version, the
//! accepting side knows that the two cannot work together, and gives this reason when it closes the connection.
//!
//! | version | news |
//! | --- | --- |
//! | 1 | |
//! | 2 | tables are sent as pages; a coordinator tells its standing; drains, offers and the worth of the next victim; 16,384 partitions |

use std::fmt;
use std::ops::RangeInclusive;

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u8);

impl Version {
    /// The first version.
    pub const FIRST: Self = Self(1);
    /// The version that brought drains and offers.
    pub const SECOND: Self = Self(2);
    /// The latest version that this release speaks.
    pub const LATEST: Self = Self::SECOND;
    /// The earliest version that this release speaks.
    pub const EARLIEST: Self = Self::FIRST;

    /// Whether this release speaks this version.
    #[must_use]
    pub fn is_spoken(self) -> bool {
        (Self::EARLIEST..=Self::LATEST).contains(&self)
    }

    /// The names of these versions in the handshake, the latest first.
    #[must_use]
    pub fn names(spoken: RangeInclusive<Self>) -> Vec<Vec<u8>> {
        (spoken.start().0..=spoken.end().0)
            .rev()
            .map(|number| Self(number).to_string().into_bytes())
            .collect()
    }

    /// The names of these versions on connections that carry only fetches, the latest first.
    #[must_use]
    pub fn names_for_blocks(spoken: RangeInclusive<Self>) -> Vec<Vec<u8>> {
        let numbers = (spoken.start().0..=spoken.end().0).rev();
        numbers.map(|number| format!("{BLOCKS}{number}").into_bytes()).collect()
    }

    /// The names of all other past and future versions, the latest first.
    #[must_use]
    pub fn other_names(spoken: RangeInclusive<Self>) -> Vec<Vec<u8>> {
        let mut names = Self::names(Self(0)..=Self(MAX_NUMBER));
        names.retain(|name| Self::named(name).is_none_or(|version| !spoken.contains(&version)));
        names
    }

    /// The version that a name of the handshake stands for.
    #[must_use]
    pub fn named(name: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(name).ok()?;
        let number = name.strip_prefix(ALL).or_else(|| name.strip_prefix(BLOCKS))?;
        number.parse().ok().map(Self)
    }

    /// The version's number.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ALL}{}", self.0)
    }
}

/// The prefix of a version's number in the names of the handshake.
const ALL: &str = "larder/";
const BLOCKS: &str = "larder-blocks/";

/// The highest version that future releases may name.
const MAX_NUMBER: u8 = 19;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_has_one_name_and_the_spoken_ones_are_apart() {
        let spoken = || Version::EARLIEST..=Version::LATEST;
        assert_eq!(Version::names(spoken()), [b"larder/2", b"larder/1"]);
        let others = Version::other_names(spoken());
        assert_eq!((others.len(), &others[0][..]), (18, &b"larder/19"[..]));
        assert!(others.iter().all(|name| !Version::named(name).unwrap().is_spoken()));
        assert_eq!(Version::named(b"h3"), None);
        let blocks = Version::names_for_blocks(spoken());
        assert_eq!(blocks, [b"larder-blocks/2", b"larder-blocks/1"]);
        assert_eq!(Version::named(&blocks[0]), Some(Version::LATEST));
    }
}
