//! Finds without a start why a coordinator would not start.

use larder_net::quic::Credentials;
use larder_protocol::identity::Role;

use super::{ServeError, console};
use crate::config::{Backend, Config};

/// Checks that this program was built with the parts that the configuration needs.
///
/// # Errors
/// [`ServeError::NotBuilt`] or [`ServeError::NoTokenizers`].
pub fn check_build(config: &Config) -> Result<(), ServeError> {
    match config.election.backend {
        Backend::Etcd if !cfg!(feature = "etcd") => Err(ServeError::NotBuilt { backend: "etcd" }),
        Backend::Kubernetes if !cfg!(feature = "kubernetes") => {
            Err(ServeError::NotBuilt { backend: "kubernetes" })
        }
        _ if config.http.console_tokenizers.is_some() && !cfg!(feature = "tokenizers") => {
            Err(ServeError::NoTokenizers)
        }
        _ => Ok(()),
    }
}

/// The faults of the certificates and of the other files that the configuration names, on this machine. Writes nothing.
#[must_use]
pub fn check_files(config: &Config) -> Vec<ServeError> {
    let mut faults = Vec::from_iter(credentials(config).err());
    faults.extend(console::tokens(config).err());
    faults.extend(console::admin_files(config).and_then(|files| console::load_admin(&files).err()));
    faults.extend(register(config));
    faults
}

/// The coordinator's certificate.
pub(super) fn credentials(config: &Config) -> Result<Credentials, ServeError> {
    let credentials = Credentials::load(&config.peer.credentials())?;
    let found = credentials.identity();
    if found.role != Role::Coordinator {
        return Err(ServeError::NotACoordinator { found: found.clone() });
    }
    Ok(credentials)
}

/// The fault of the files with which the coordinator reaches the election's register.
fn register(config: &Config) -> Option<ServeError> {
    match config.election.backend {
        #[cfg(feature = "etcd")]
        Backend::Etcd => {
            let made = crate::register::etcd::Etcd::new(&config.election);
            made.err().map(|error| ServeError::Register(error.into()))
        }
        #[cfg(feature = "kubernetes")]
        Backend::Kubernetes => {
            let read = crate::register::kubernetes::check_file(config.election.kubeconfig.as_deref()?);
            read.err().map(|error| ServeError::Register(error.into()))
        }
        _ => None,
    }
}
