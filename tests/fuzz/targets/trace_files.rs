//! The target `trace_files` as a program of cargo-fuzz.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    larder_fuzz::trace_files(bytes);
});
