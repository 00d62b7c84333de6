//! Certificates: those that an unknown process shows, and the files of its operator.

use std::time::{Duration, UNIX_EPOCH};

use larder_net::quic::ca::Authority;
use larder_net::quic::{Credentials, CredentialsError, inspect_pem};
use larder_protocol::identity::Identity;
use larder_protocol::limits::MAX_NAME_BYTES;

/// Tests the reader of certificates: the bytes are taken as PEM, as the DER of one certificate, and as an authority.
///
/// - An accepted certificate has an identity; its text is in the certificate, and is read back as the same identity.
/// - A certificate that would be accepted by others is accepted here, as the same identity.
///
/// Returns whether the bytes are a certificate with an identity.
///
/// # Panics
/// Panics if a property does not hold.
pub fn certificates(bytes: &[u8]) -> bool {
    let as_pem = pem(bytes);
    let _ = Authority::load(&String::from_utf8_lossy(bytes), CA_KEY);
    let _ = Authority::load(&as_pem, CA_KEY);
    let _ = Credentials::from_pem(bytes, LEAF.as_bytes(), LEAF_KEY.as_bytes());
    let _ = Credentials::from_pem(CA.as_bytes(), LEAF.as_bytes(), bytes);
    // No short circuit: both forms are tested.
    [hold(bytes), hold(as_pem.as_bytes())].contains(&true)
}

fn hold(certificate: &[u8]) -> bool {
    let (ca, key) = (CA.as_bytes(), LEAF_KEY.as_bytes());
    let accepted = Credentials::from_pem(ca, certificate, key);
    let inspected = inspect_pem(ca, certificate, key, UNIX_EPOCH + Duration::from_secs(NOW_SECONDS));
    if let Ok(inspected) = inspected {
        let credentials = accepted.as_ref().expect("others accept it");
        assert_eq!(inspected.identity, *credentials.identity());
    }
    match accepted {
        Ok(credentials) => {
            let Identity { tenant, name, .. } = credentials.identity();
            assert!((1..=MAX_NAME_BYTES).contains(&name.len()));
            assert!(tenant.as_ref().is_none_or(|tenant| (1..=MAX_NAME_BYTES).contains(&tenant.len())));
            assert_eq!(credentials.identity().to_string().parse().as_ref(), Ok(credentials.identity()));
            true
        }
        // The certificate is valid, but has another key.
        Err(CredentialsError::Tls(_)) => true,
        Err(_) => false,
    }
}

/// Turns DER into PEM.
fn pem(der: &[u8]) -> String {
    let digit = |six: u32| char::from(DIGITS[(six & 63) as usize]);
    let mut text = String::from("-----BEGIN CERTIFICATE-----\n");
    for (line, bytes) in der.chunks(48).enumerate() {
        if line > 0 {
            text.push('\n');
        }
        for three in bytes.chunks(3) {
            let number = three
                .iter()
                .chain([0, 0].iter())
                .take(3)
                .fold(0, |number, &byte| number << 8 | u32::from(byte));
            let digits = [18, 12, 6, 0].map(|shift| digit(number >> shift));
            text.extend(&digits[..=three.len()]);
            text.extend(std::iter::repeat_n('=', 3 - three.len()));
        }
    }
    text + "\n-----END CERTIFICATE-----\n"
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// A time in 2030, when the tests' certificates are valid.
const NOW_SECONDS: u64 = 1_893_456_000;

// Made by `larder ca`, valid for a hundred years, and trusted by nobody.
const CA: &str = include_str!("../certificates/ca.pem");
const CA_KEY: &str = include_str!("../certificates/ca.key");
const LEAF: &str = include_str!("../certificates/node-0.pem");
const LEAF_KEY: &str = include_str!("../certificates/node-0.key");
const ENGINE: &str = include_str!("../certificates/engine-0.pem");

/// Certificates of a node and of an engine; a chain with its authority.
pub(crate) fn examples() -> Vec<Vec<u8>> {
    vec![LEAF.into(), ENGINE.into(), [LEAF, CA].concat().into()]
}
