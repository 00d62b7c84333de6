//! The properties of every message in rkyv.

use rkyv::util::AlignedVec;

/// Tests a message's properties. Returns the message if the bytes are one.
///
/// - A message that was read is encoded, read again, and encoded to the same bytes.
/// - A message is no larger than the bytes that it came in: no two fields share bytes.
pub(crate) fn hold<T, E: std::fmt::Debug>(
    payload: &[u8],
    decode: impl Fn(&[u8]) -> Result<T, E>,
    encode: impl Fn(&T) -> AlignedVec,
) -> Option<T> {
    let mut aligned = AlignedVec::<16>::new();
    aligned.extend_from_slice(payload);
    let message = decode(&aligned).ok()?;
    let encoded = encode(&message);
    // Between fields the encoder leaves up to 15 bytes; another encoder may leave none.
    assert!(
        encoded.len() <= 2 * payload.len() + 64,
        "{} bytes came, {} are meant",
        payload.len(),
        encoded.len()
    );
    let again = decode(&encoded).expect("what was encoded is read");
    assert!(encode(&again)[..] == encoded[..], "what is read is encoded to other bytes");
    Some(message)
}
