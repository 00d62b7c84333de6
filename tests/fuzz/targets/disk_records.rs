//! The target `disk_records` as a program of cargo-fuzz.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    larder_fuzz::disk_records(bytes);
});
