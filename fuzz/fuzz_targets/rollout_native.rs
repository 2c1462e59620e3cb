#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rollout_codec::fuzzing::native(data));
