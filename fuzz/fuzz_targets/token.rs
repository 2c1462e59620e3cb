#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| control_proto::fuzzing::token(data));
