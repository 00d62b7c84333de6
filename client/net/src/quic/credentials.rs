//! A process's own certificate and its trust in others, as TLS takes them.
//!
//! Both sides show a certificate. A node speaks for itself alone: others refuse its announcements for another node.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use larder_protocol::identity::Identity;
use larder_protocol::version::Version;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite::TLS13_AES_128_GCM_SHA256, default_provider};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::endpoint::{IdentityError, identity_of};

/// The files of a process's certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialFiles {
    /// Certificates of the authorities that are trusted (PEM).
    pub ca: PathBuf,
    /// The process's own certificate chain (PEM).
    pub certificate: PathBuf,
    /// Its private key (PEM).
    pub key: PathBuf,
}

/// A process's own certificate and the authorities that it trusts.
#[derive(Clone)]
pub struct Credentials {
    identity: Identity,
    /// The [`digest`] of the files that the credentials were made of.
    pem: u64,
    client: Arc<QuicClientConfig>,
    server: Arc<QuicServerConfig>,
    /// The same for connections that carry only fetches.
    client_for_blocks: Arc<QuicClientConfig>,
    server_for_blocks: Arc<QuicServerConfig>,
    /// The same for connections over TCP, which carry only fetches too.
    client_over_tcp: Arc<ClientConfig>,
    server_over_tcp: Arc<ServerConfig>,
}

/// One of the three parts of credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The authorities' certificates.
    Ca,
    /// The own certificate chain.
    Certificate,
    /// The private key.
    Key,
}

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("cannot read {}: `larder ca init` and `larder ca issue` make such files", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file lacks the expected part.
    #[error("the file has no {part}: PEM is expected")]
    Empty {
        /// The missing part.
        part: Part,
    },
    /// The certificate does not say who this is.
    #[error("the certificate names no Larder identity")]
    Identity(#[source] IdentityError),
    /// TLS cannot use the credentials; for example, the key is not the certificate's.
    #[error("certificate, key and authorities do not match")]
    Tls(#[source] rustls::Error),
    /// No authority is trusted.
    #[error("the authorities' certificates cannot be used")]
    Authorities(#[source] rustls::server::VerifierBuilderError),
}

/// The contents of credentials' files: authorities, certificate and key.
pub(super) type Pem = [Vec<u8>; 3];

impl CredentialFiles {
    /// Authorities, certificate and key as they are in the files.
    pub(super) fn read(&self) -> Result<Pem, CredentialsError> {
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|source| CredentialsError::Read { path: path.clone(), source })
        };
        Ok([read(&self.ca)?, read(&self.certificate)?, read(&self.key)?])
    }
}

impl Credentials {
    /// Reads PEM files.
    ///
    /// # Errors
    /// [`CredentialsError`] says which part is wrong.
    pub fn load(files: &CredentialFiles) -> Result<Self, CredentialsError> {
        let [ca, certificate, key] = files.read()?;
        Self::from_pem(&ca, &certificate, &key)
    }

    /// Makes credentials from the files' contents.
    ///
    /// # Errors
    /// [`CredentialsError`] says which part is wrong.
    pub fn from_pem(ca: &[u8], certificate: &[u8], key: &[u8]) -> Result<Self, CredentialsError> {
        Self::speaking(Version::EARLIEST..=Version::LATEST, ca, certificate, key)
    }

    /// As [`Credentials::from_pem`], for a process that speaks these versions, so that tests have processes of other releases.
    ///
    /// # Errors
    /// [`CredentialsError`] says which part is wrong.
    #[doc(hidden)]
    pub fn speaking(
        spoken: RangeInclusive<Version>,
        ca: &[u8],
        certificate: &[u8],
        key: &[u8],
    ) -> Result<Self, CredentialsError> {
        let pem = digest([ca, certificate, key]);
        let mut roots = RootCertStore::empty();
        for authority in certificates(ca, Part::Ca)? {
            roots.add(authority).map_err(CredentialsError::Tls)?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(certificate, Part::Certificate)?;
        let identity = identity_of(&chain).map_err(CredentialsError::Identity)?;
        let key =
            PrivateKeyDer::from_pem_slice(key).map_err(|_| CredentialsError::Empty { part: Part::Key })?;
        let mut client = client_config(Arc::clone(&roots), chain.clone(), key.clone_key())?;
        let mut server = server_config(roots, chain, key)?;
        let quic = |client: &ClientConfig, server: &ServerConfig| {
            let tls = |_| CredentialsError::Tls(rustls::Error::General("the cipher is not for QUIC".into()));
            let client = QuicClientConfig::try_from(client.clone()).map_err(tls)?;
            Ok((Arc::new(client), Arc::new(QuicServerConfig::try_from(server.clone()).map_err(tls)?)))
        };
        client.alpn_protocols = Version::names_for_blocks(spoken.clone());
        server.alpn_protocols = Version::names_for_blocks(spoken.clone());
        let (client_for_blocks, server_for_blocks) = quic(&client, &server)?;
        let (client_over_tcp, server_over_tcp) = (Arc::new(client.clone()), Arc::new(server.clone()));
        client.alpn_protocols = Version::names(spoken.clone());
        server.alpn_protocols = [Version::names(spoken.clone()), Version::other_names(spoken)].concat();
        let (client, server) = quic(&client, &server)?;
        Ok(Self {
            identity,
            pem,
            client,
            server,
            client_for_blocks,
            server_for_blocks,
            client_over_tcp,
            server_over_tcp,
        })
    }

    /// The same credentials for connections that carry only fetches. They connect only to endpoints with such credentials, and no
    /// other endpoint connects to them.
    pub fn for_blocks(&self) -> Self {
        let (client, server) = (Arc::clone(&self.client_for_blocks), Arc::clone(&self.server_for_blocks));
        Self { client, server, ..self.clone() }
    }

    /// The identity in the process's certificate.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The [`digest`] of the files that the credentials were made of.
    pub(super) fn pem(&self) -> u64 {
        self.pem
    }

    pub(super) fn client(&self) -> Arc<QuicClientConfig> {
        Arc::clone(&self.client)
    }

    pub(super) fn server(&self) -> Arc<QuicServerConfig> {
        Arc::clone(&self.server)
    }

    pub(crate) fn client_over_tcp(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client_over_tcp)
    }

    pub(crate) fn server_over_tcp(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server_over_tcp)
    }
}

/// A number that differs for other authorities, another certificate or another key.
pub(super) fn digest(pem: [&[u8]; 3]) -> u64 {
    let mut hasher = DefaultHasher::new();
    pem.hash(&mut hasher);
    hasher.finish()
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ca => "certificate of an authority",
            Self::Certificate => "certificate",
            Self::Key => "private key",
        })
    }
}

pub(super) fn certificates(pem: &[u8], part: Part) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    found.ok().filter(|found| !found.is_empty()).ok_or(CredentialsError::Empty { part })
}

fn client_config(
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, CredentialsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(CredentialsError::Tls)?
        .with_root_certificates(roots);
    let mut config = builder.with_client_auth_cert(chain, key).map_err(CredentialsError::Tls)?;
    // Each connection shows its certificate, so an expired certificate opens no more connections.
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn server_config(
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, CredentialsError> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(CredentialsError::Tls)?
        .with_client_cert_verifier(verifier.map_err(CredentialsError::Authorities)?);
    let mut config = builder.with_single_cert(chain, key).map_err(CredentialsError::Tls)?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Only AES-128: see the measurements in `settings`.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider { cipher_suites: vec![TLS13_AES_128_GCM_SHA256], ..default_provider() })
}
