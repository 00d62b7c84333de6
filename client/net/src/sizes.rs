//! Sizes in configuration files, for serde.

use std::fmt;

use bytesize::ByteSize;
use serde::de::{self, Unexpected, Visitor};
use serde::{Deserializer, Serialize, Serializer};

/// Writes a size as a number: as a text it would be rounded.
///
/// # Errors
/// The serializer's errors.
pub fn exact<S: Serializer>(
    size: &(impl Into<Option<ByteSize>> + Copy),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    (*size).into().map(|size| size.0).serialize(serializer)
}

/// Reads a size as people write it. The error for any other value says how to write one.
///
/// # Errors
/// Fails if the value is no size.
pub fn size<'de, D: Deserializer<'de>, S: From<ByteSize>>(deserializer: D) -> Result<S, D::Error> {
    deserializer.deserialize_any(SizeVisitor).map(S::from)
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size: a number of bytes, or a text such as \"1GiB\" (2^30) or \"1GB\" (10^9)")
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
        let wrong = || E::invalid_value(Unexpected::Signed(bytes), &self);
        u64::try_from(bytes).map(ByteSize).map_err(|_| wrong())
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }
}
