//! The cryptography of rustls.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

use crate::TlsError;

/// The first of aws-lc-rs, graviola if the processor supports it, and ring, as far as the features
/// include them, or else the provider that the program installed for the process.
///
/// # Errors
/// If there is none.
pub(crate) fn provider() -> Result<Arc<CryptoProvider>, TlsError> {
    built_in()
        .map(Arc::new)
        .or_else(|| CryptoProvider::get_default().cloned())
        .ok_or_else(|| TlsError::new("no cryptography: switch on a feature of ringserve (`tls-ring`, `tls-graviola`, `tls-aws-lc-rs`), \
             or give a provider of rustls to `Tls::provider`"))
}

#[allow(unreachable_code)]
fn built_in() -> Option<CryptoProvider> {
    #[cfg(feature = "aws-lc-rs")]
    return Some(rustls::crypto::aws_lc_rs::default_provider());
    #[cfg(feature = "graviola")]
    if graviola_runs() {
        return Some(rustls_graviola::default_provider());
    }
    #[cfg(feature = "ring")]
    return Some(rustls::crypto::ring::default_provider());
    None
}

/// True if this processor has the instructions that graviola needs.
#[cfg(all(feature = "graviola", target_arch = "x86_64"))]
fn graviola_runs() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("adx")
        && has!("bmi1")
        && has!("bmi2")
        && has!("avx2")
        && has!("aes")
        && has!("pclmulqdq")
        && has!("ssse3")
}

#[cfg(all(feature = "graviola", target_arch = "aarch64"))]
fn graviola_runs() -> bool {
    use std::arch::is_aarch64_feature_detected as has;
    has!("aes") && has!("sha2") && has!("pmull")
}
