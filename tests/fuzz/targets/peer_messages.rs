//! The target `peer_messages` as a program of cargo-fuzz.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    larder_fuzz::peer_messages(bytes);
});
