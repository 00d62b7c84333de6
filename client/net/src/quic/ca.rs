//! A small certificate authority: makes the certificates that the processes of a cluster show each other.
//!
//! For development clusters, and for operators without an authority of their own. Certificates of any other authority do as
//! well, provided they carry an identity as [`larder_protocol::identity`] says.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_protocol::identity::Identity;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use webpki::EndEntityCert;

/// A certificate authority. A process that trusts it trusts every certificate that it issues.
pub struct Authority {
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key.
#[derive(Clone)]
pub struct Issued {
    /// The certificate (PEM).
    pub certificate_pem: String,
    /// The certificate's private key (PEM). Its owner can act under the certificate's identity.
    pub key_pem: String,
}

/// The time in which a certificate may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// From when on.
    pub not_before: SystemTime,
    /// Until when.
    pub not_after: SystemTime,
}

/// A certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The authority's files are not a certificate and its key.
    #[error("these files are no authority's certificate and key: `larder ca init` makes them")]
    NotAnAuthority(#[source] rcgen::Error),
    /// The key is not that of the certificate.
    #[error(
        "the key is not the certificate's: take both files from one backup, or repeat the interrupted step of `larder ca rotate`"
    )]
    OtherKey,
    /// Making keys or signing failed.
    #[error("no certificate can be made")]
    Make(#[from] rcgen::Error),
}

impl Validity {
    /// Valid from an hour ago, since clocks differ, for `days` days.
    pub fn days(days: u32) -> Self {
        let now = SystemTime::now();
        let not_before = now - Duration::from_secs(3_600);
        Self { not_before, not_after: now + Duration::from_secs(u64::from(days) * SECONDS_OF_A_DAY) }
    }
}

impl Authority {
    /// A new authority, with its files: certificate and key.
    ///
    /// # Errors
    /// [`AuthorityError::Make`] if the system has no randomness.
    pub fn create(validity: Validity) -> Result<(Self, Issued), AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = params(validity);
        params.distinguished_name.push(DnType::CommonName, "Larder authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate_pem = params.self_signed(&key)?.pem();
        let files = Issued { certificate_pem: certificate_pem.clone(), key_pem: key.serialize_pem() };
        Ok((Self { certificate_pem, issuer: Issuer::new(params, key) }, files))
    }

    /// An authority from its files.
    ///
    /// # Errors
    /// [`AuthorityError::NotAnAuthority`] or [`AuthorityError::OtherKey`] if the files are not an authority's.
    pub fn load(certificate_pem: &str, key_pem: &str) -> Result<Self, AuthorityError> {
        let key = KeyPair::from_pem(key_pem).map_err(AuthorityError::NotAnAuthority)?;
        let public_key = key.public_key_raw().to_owned();
        let issuer =
            Issuer::from_ca_cert_pem(certificate_pem, key).map_err(AuthorityError::NotAnAuthority)?;
        let certificate = CertificateDer::from_pem_slice(certificate_pem.as_bytes()).ok();
        let parsed = certificate.as_ref().and_then(|der| EndEntityCert::try_from(der).ok());
        if !parsed.is_some_and(|parsed| parsed.subject_public_key_info().ends_with(&public_key)) {
            return Err(AuthorityError::OtherKey);
        }
        Ok(Self { certificate_pem: certificate_pem.to_owned(), issuer })
    }

    /// The authority's certificate (PEM).
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// A certificate for a process, good for both ends of a connection.
    ///
    /// # Errors
    /// [`AuthorityError::Make`] if the system has no randomness, or the identity does not fit a certificate.
    pub fn issue(&self, identity: &Identity, validity: Validity) -> Result<Issued, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = params(validity);
        params.distinguished_name.push(DnType::CommonName, identity.name.as_str());
        params.subject_alt_names = vec![
            SanType::URI(Ia5String::try_from(identity.to_string())?),
            SanType::DnsName(Ia5String::try_from(identity.role.server_name())?),
        ];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate_pem = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Issued { certificate_pem, key_pem: key.serialize_pem() })
    }
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issued").field("certificate_pem", &self.certificate_pem).finish_non_exhaustive()
    }
}

fn params(validity: Validity) -> CertificateParams {
    let date = |time: SystemTime| {
        date_time_ymd(1970, 1, 1) + time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO)
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = date(validity.not_before);
    params.not_after = date(validity.not_after);
    params
}

const SECONDS_OF_A_DAY: u64 = 24 * 3_600;

#[cfg(test)]
mod tests {
    use larder_protocol::identity::Role;

    use super::super::{Credentials, CredentialsError};
    use super::*;

    #[test]
    fn an_authority_read_back_issues_what_the_first_one_would_have() {
        let (_, files) = Authority::create(Validity::days(1)).unwrap();
        let authority = Authority::load(&files.certificate_pem, &files.key_pem).unwrap();
        let identity = Identity::engine("red", "vllm-0");
        let issued = authority.issue(&identity, Validity::days(1)).unwrap();
        let ca = files.certificate_pem.as_bytes();
        let credentials =
            Credentials::from_pem(ca, issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes()).unwrap();
        assert_eq!(*credentials.identity(), identity);
    }

    #[test]
    fn files_that_are_no_authority_are_refused() {
        let (_, files) = Authority::create(Validity::days(1)).unwrap();
        assert!(matches!(Authority::load("garbage", &files.key_pem), Err(AuthorityError::NotAnAuthority(_))));
        assert!(matches!(
            Authority::load(&files.certificate_pem, ""),
            Err(AuthorityError::NotAnAuthority(_))
        ));
    }

    #[test]
    fn a_key_of_another_authority_is_refused() {
        let [(_, one), (_, other)] = [1, 2].map(|days| Authority::create(Validity::days(days)).unwrap());
        let both = one.certificate_pem.clone() + &other.certificate_pem;
        assert!(Authority::load(&both, &one.key_pem).is_ok(), "the first certificate counts");
        assert!(matches!(Authority::load(&both, &other.key_pem), Err(AuthorityError::OtherKey)));
    }

    #[test]
    fn a_certificate_without_identity_or_with_another_key_is_no_credential() {
        let (authority, files) = Authority::create(Validity::days(1)).unwrap();
        let ca = files.certificate_pem.as_bytes();
        let own = Credentials::from_pem(ca, ca, files.key_pem.as_bytes());
        assert!(matches!(own, Err(CredentialsError::Identity(_))), "{own:?}");
        let issue = || authority.issue(&Identity::new(Role::Node, "a"), Validity::days(1)).unwrap();
        let (one, other) = (issue(), issue());
        let mixed =
            Credentials::from_pem(ca, one.certificate_pem.as_bytes(), other.key_pem.as_bytes()).unwrap_err();
        assert!(matches!(mixed, CredentialsError::Tls(_)), "{mixed:?}");
    }
}
