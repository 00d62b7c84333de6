//! Checks whether certificate files can be used, and for how long.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_protocol::identity::Identity;
use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{ALL_VERIFICATION_ALGS, EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use super::credentials::{CredentialFiles, Credentials, CredentialsError, Part, certificates};

/// The facts of certificate files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspected {
    /// The identity in the certificate.
    pub identity: Identity,
    /// Until when the certificate may be used; `None` if it never expires.
    pub not_after: Option<SystemTime>,
}

/// Why other processes would turn these certificate files down.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The files are no credentials.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The certificate may no longer be used.
    #[error("the certificate has expired")]
    Expired {
        /// When the certificate expired.
        not_after: SystemTime,
    },
    /// The certificate may not be used yet.
    #[error("the certificate is not valid yet")]
    NotYet {
        /// The time from which on the certificate may be used.
        not_before: SystemTime,
    },
    /// No trusted authority has issued it.
    #[error("none of the authorities in the [cluster] ca file has issued the certificate")]
    UnknownIssuer,
    /// Something else is wrong with it.
    #[error("the certificate is not accepted: {reason}")]
    Refused {
        /// The reason.
        reason: String,
    },
}

/// Judges certificate files at the time `now` as other processes would, for both ends of a connection.
///
/// # Errors
/// [`InspectError`] names the fault for which others would refuse the certificate.
pub fn inspect(files: &CredentialFiles, now: SystemTime) -> Result<Inspected, InspectError> {
    let [ca, certificate, key] = files.read()?;
    inspect_pem(&ca, &certificate, &key, now)
}

/// As [`inspect`], from the files' contents.
///
/// # Errors
/// [`InspectError`] names the fault for which others would refuse the certificate.
pub fn inspect_pem(
    ca: &[u8],
    certificate: &[u8],
    key: &[u8],
    now: SystemTime,
) -> Result<Inspected, InspectError> {
    let identity = Credentials::from_pem(ca, certificate, key)?.identity().clone();
    let authorities = certificates(ca, Part::Ca)?;
    let chain = certificates(certificate, Part::Certificate)?;
    for usage in [KeyUsage::client_auth(), KeyUsage::server_auth()] {
        verify(&authorities, &chain, now, usage).map_err(explain)?;
    }
    let end_of_time = UNIX_EPOCH + Duration::from_secs(END_OF_TIME_SECONDS);
    let not_after = match verify(&authorities, &chain, end_of_time, KeyUsage::client_auth()) {
        Err(webpki::Error::CertExpired { not_after, .. }) => Some(time(not_after)),
        _ => None,
    };
    Ok(Inspected { identity, not_after })
}

fn verify(
    authorities: &[CertificateDer<'_>],
    chain: &[CertificateDer<'_>],
    at: SystemTime,
    usage: KeyUsage,
) -> Result<(), webpki::Error> {
    let anchors = authorities.iter().map(anchor_from_trusted_cert).collect::<Result<Vec<_>, _>>()?;
    let (own, intermediates) = chain.split_first().ok_or(webpki::Error::BadDer)?;
    let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap_or_default());
    let own = EndEntityCert::try_from(own)?;
    own.verify_for_usage(ALL_VERIFICATION_ALGS, &anchors, intermediates, at, usage, None, None).map(drop)
}

fn explain(error: webpki::Error) -> InspectError {
    match error {
        webpki::Error::CertExpired { not_after, .. } => InspectError::Expired { not_after: time(not_after) },
        webpki::Error::CertNotValidYet { not_before, .. } => {
            InspectError::NotYet { not_before: time(not_before) }
        }
        // If two authorities have the same name, their keys show which of them issued the certificate.
        webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey => {
            InspectError::UnknownIssuer
        }
        other => InspectError::Refused { reason: other.to_string() },
    }
}

fn time(time: UnixTime) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(time.as_secs())
}

/// The last second that a certificate can name: every certificate that ends at all has expired by then.
const END_OF_TIME_SECONDS: u64 = 253_402_300_799;
