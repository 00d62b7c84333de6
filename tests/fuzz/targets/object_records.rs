//! The target `object_records` as a program of cargo-fuzz.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    larder_fuzz::object_records(bytes);
});
