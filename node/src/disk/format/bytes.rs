//! Little-endian numbers, written and read one after the other.

use xxhash_rust::xxh3::xxh3_64;

use super::{FormatError, VERSION};

/// Writes a structure, one field after the other.
#[derive(Default)]
pub(super) struct Writer(Vec<u8>);

/// Reads a structure, one field after the other. A read past the end is an error, never a panic.
pub(super) struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl Writer {
    pub(super) fn new(magic: &[u8; 8]) -> Self {
        Self(magic.to_vec())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn zeros(&mut self, count: usize) -> &mut Self {
        self.pad_to(self.0.len() + count)
    }

    pub(super) fn pad_to(&mut self, bytes: usize) -> &mut Self {
        self.0.resize(bytes, 0);
        self
    }

    pub(super) fn u8(&mut self, number: u8) -> &mut Self {
        self.bytes(&[number])
    }

    pub(super) fn u16(&mut self, number: u16) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    pub(super) fn u32(&mut self, number: u32) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    pub(super) fn u64(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    /// Writes the checksum of all bytes so far.
    pub(super) fn checksum(&mut self) -> &mut Self {
        self.u64(xxh3_64(&self.0))
    }

    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}

impl<'a> Reader<'a> {
    /// A reader behind the magic and the version, which must be right.
    pub(super) fn new(all: &'a [u8], magic: &[u8; 8]) -> Result<Self, FormatError> {
        let mut reader = Self::bare(all);
        if reader.bytes::<8>().map_err(|_| FormatError::Magic)? != *magic {
            return Err(FormatError::Magic);
        }
        match reader.u16()? {
            VERSION => Ok(reader),
            found => Err(FormatError::Version { found }),
        }
    }

    /// A reader from the first byte on.
    pub(super) fn bare(all: &'a [u8]) -> Self {
        Self { all, at: 0 }
    }

    pub(super) fn bytes<const COUNT: usize>(&mut self) -> Result<[u8; COUNT], FormatError> {
        let bytes = self.all[self.at..].first_chunk().ok_or(FormatError::Field)?;
        self.at += COUNT;
        Ok(*bytes)
    }

    pub(super) fn skip(&mut self, count: usize) -> Result<(), FormatError> {
        if self.all.len() - self.at < count {
            return Err(FormatError::Field);
        }
        self.at += count;
        Ok(())
    }

    pub(super) fn u8(&mut self) -> Result<u8, FormatError> {
        self.bytes().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, FormatError> {
        self.bytes().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, FormatError> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, FormatError> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Reads a checksum, and compares it with the bytes before it.
    pub(super) fn checksum(&mut self) -> Result<(), FormatError> {
        let right = xxh3_64(&self.all[..self.at]);
        if self.u64()? == right { Ok(()) } else { Err(FormatError::Checksum) }
    }
}
