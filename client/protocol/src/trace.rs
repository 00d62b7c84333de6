//! The place of a request in a distributed trace, as W3C Trace Context writes it.
//!
//! <https://www.w3.org/TR/trace-context/>: `00-TRACE ID-PARENT ID-FLAGS`, in lowercase hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use rkyv::{Archive, Deserialize, Serialize};

/// The span that caused a request, and its trace.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// The trace; not all zero.
    pub trace_id: [u8; 16],
    /// The span; not all zero.
    pub span_id: [u8; 8],
    /// Bit 0: whether the trace is recorded.
    pub flags: u8,
}

/// The text is no `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no W3C traceparent: it looks like 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
pub struct InvalidTraceparent;

impl TraceContext {
    /// Whether the trace is recorded. If not, no process records its part.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Whether the context names a trace and a span: a sender may give zeros.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.trace_id != [0; 16] && self.span_id != [0; 8]
    }
}

impl FromStr for TraceContext {
    type Err = InvalidTraceparent;

    fn from_str(text: &str) -> Result<Self, InvalidTraceparent> {
        let mut parts = text.split('-');
        let mut part = || parts.next().ok_or(InvalidTraceparent);
        let ([version], trace_id, span_id, [flags]) =
            (bytes::<1>(part()?)?, bytes(part()?)?, bytes(part()?)?, bytes::<1>(part()?)?);
        // Later versions may have further parts.
        if version == FORBIDDEN_VERSION || (version == 0 && parts.next().is_some()) {
            return Err(InvalidTraceparent);
        }
        let context = Self { trace_id, span_id, flags };
        if context.is_valid() { Ok(context) } else { Err(InvalidTraceparent) }
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("00-")?;
        self.trace_id.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("-")?;
        self.span_id.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-{:02x}", self.flags)
    }
}

/// Exactly `N` bytes in lowercase hexadecimal digits.
fn bytes<const N: usize>(text: &str) -> Result<[u8; N], InvalidTraceparent> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(InvalidTraceparent);
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| InvalidTraceparent)?;
    }
    Ok(bytes)
}

/// The flag of a trace that is recorded.
const SAMPLED: u8 = 1;

/// The version that the standard forbids.
const FORBIDDEN_VERSION: u8 = 0xff;

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_and_written() {
        let context: TraceContext = EXAMPLE.parse().unwrap();
        assert!(context.is_sampled());
        assert_eq!(context.span_id, [0xb7, 0xad, 0x6b, 0x71, 0x69, 0x20, 0x33, 0x31]);
        assert_eq!(context.to_string(), EXAMPLE);
        assert!(!EXAMPLE.replace("-01", "-00").parse::<TraceContext>().unwrap().is_sampled());
    }

    #[test]
    fn a_later_version_may_say_more() {
        let later = EXAMPLE.replace("00-0a", "01-0a") + "-more";
        assert_eq!(later.parse::<TraceContext>(), EXAMPLE.parse());
    }

    #[test]
    fn what_is_no_traceparent_is_refused() {
        for wrong in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333é-01",
        ] {
            assert_eq!(wrong.parse::<TraceContext>(), Err(InvalidTraceparent), "{wrong}");
        }
    }
}
