//! See `ringserve_fuzz::switching`. Built without cargo-fuzz it runs the files it is given, to look
//! at what was found.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ringserve_fuzz::switching::run(bytes));

#[cfg(not(fuzzing))]
fn main() {
    ringserve_fuzz::replay(ringserve_fuzz::switching::run);
}
