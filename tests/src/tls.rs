//! Certificates for servers of other programs on this machine, and for their clients.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

/// The certificate files of a server or a client.
pub struct Files {
    /// The certificate of the authority.
    pub ca_pem: String,
    /// The certificate of the server or client.
    pub certificate_pem: String,
    /// The private key.
    pub key_pem: String,
}

/// An authority that nobody else knows.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// Makes an authority.
    ///
    /// # Errors
    /// Fails if no key can be made.
    pub fn create() -> anyhow::Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        params.distinguished_name = named("an authority");
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem })
    }

    /// Issues a certificate for 127.0.0.1 and for this name. etcd takes the name for a user's.
    ///
    /// # Errors
    /// Fails if no key can be made.
    pub fn issue(&self, name: &str) -> anyhow::Result<Files> {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])?;
        params.distinguished_name = named(name);
        let key = KeyPair::generate()?;
        let certificate_pem = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Files { ca_pem: self.pem.clone(), certificate_pem, key_pem: key.serialize_pem() })
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}
