//! The name of a chunk.

#![expect(unsafe_code, reason = "a hash is checked in one step, not byte by byte")]

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use rkyv::bytecheck::CheckBytes;
use rkyv::rancor::Fallible;
use rkyv::{Archive, Deserialize, Serialize};

/// The 32-byte hash that names a chunk and, because hashes are chained, the whole prefix up to its end.
///
/// It is Larder's own hash (see [`crate::hashing`]) or the engine's.
#[derive(Archive, Serialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, rkyv::Portable)]
#[rkyv(as = ChunkHash)]
#[repr(transparent)]
pub struct ChunkHash(pub [u8; 32]);

// The derived code checks and copies an array byte by byte. With hundreds of hashes in a prompt, that took as many instructions
// as the store's lookup.

// SAFETY: every value of 32 bytes is a hash, and the caller upholds that there are 32 bytes.
unsafe impl<C: Fallible + ?Sized> CheckBytes<C> for ChunkHash {
    unsafe fn check_bytes(_: *const Self, _: &mut C) -> Result<(), C::Error> {
        Ok(())
    }
}

impl<D: Fallible + ?Sized> Deserialize<Self, D> for ChunkHash {
    fn deserialize(&self, _: &mut D) -> Result<Self, D::Error> {
        Ok(*self)
    }
}

// The derived code hashes a length and a slice of bytes: four times as many instructions.
impl Hash for ChunkHash {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let (halves, _) = self.0.as_chunks();
        halves.iter().for_each(|&half| state.write_u128(u128::from_le_bytes(half)));
    }
}

impl ChunkHash {
    /// The first eight bytes as a number: enough to tell chunks apart in a sketch or a ghost list, never a key.
    #[must_use]
    pub fn short(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for ChunkHash {
    type Err = ParseHashError;

    fn from_str(text: &str) -> Result<Self, ParseHashError> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(ParseHashError::Length { found: digits.len() });
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (hex_digit(pair[0])? << 4) | hex_digit(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

/// A chunk with its place in its chain. A chunk never travels as a bare hash.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRef {
    /// The hash that names the chunk.
    pub hash: ChunkHash,
    /// The chunk before it; the namespace's root for the first, and for every chunk of a flat namespace.
    pub parent: ChunkHash,
    /// The number of chunks before it in its prompt; always 0 in a flat namespace.
    pub index: u32,
    /// The first chunk of its run (see [`crate::run`]); the chunk itself in a flat namespace.
    pub anchor: ChunkHash,
}

impl ChunkRef {
    /// Whether both names put the same chunk at the same place in a prompt. The anchor does not count: it follows from the
    /// earlier chunks, and earlier versions have other anchors.
    #[must_use]
    pub fn stands_with(&self, other: &Self) -> bool {
        (self.hash, self.parent, self.index) == (other.hash, other.parent, other.index)
    }
}

/// Why a text is not a chunk hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseHashError {
    /// Not 64 characters long.
    #[error("a chunk hash has 64 hexadecimal digits, this has {found} characters")]
    Length {
        /// Bytes found.
        found: usize,
    },
    /// A namespace's name has fewer than 16 or more than 64 characters.
    #[error("a namespace's fingerprint has 16 to 64 hexadecimal digits, this has {found} characters")]
    NamespaceLength {
        /// Bytes found.
        found: usize,
    },
    /// A character that is no hexadecimal digit.
    #[error("`{found}` is not a hexadecimal digit")]
    Digit {
        /// The character found.
        found: char,
    },
}

fn hex_digit(byte: u8) -> Result<u8, ParseHashError> {
    match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        b'A'..=b'F' => Ok(byte - b'A' + 10),
        _ => Err(ParseHashError::Digit { found: char::from(byte) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_survives_being_printed_and_read_back() {
        let hash = ChunkHash(std::array::from_fn(|i| i as u8 * 7));
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert_eq!("zz".repeat(32).parse::<ChunkHash>(), Err(ParseHashError::Digit { found: 'z' }));
        assert_eq!("00".parse::<ChunkHash>(), Err(ParseHashError::Length { found: 2 }));
    }
}
