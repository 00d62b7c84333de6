//! Opens the console: its tokens, and the admin in whose name it changes nodes.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};

use larder_net::audit::Audit;
use larder_net::metrics::EarliestEnd;
use larder_net::quic::{
    CredentialFiles, Credentials, Endpoint, RENEWAL_CHECK, TransportSettings, renew_when_changed,
};
use larder_protocol::identity::Role;

use super::ServeError;
use crate::config::Config;
use crate::gather;
use crate::http::{Token, Tokenizers, Tokens};
use crate::nodes::Nodes;

/// The console's tokens, and the admin that changes nodes, if there is one. `ends` gets the end of the admin's certificate.
pub(crate) fn open(
    config: &Config,
    audit: &Audit,
    ends: EarliestEnd,
) -> Result<(Tokens, Option<gather::Admin>), ServeError> {
    let tokens = tokens(config)?;
    let Some(files) = admin_files(config) else { return Ok((tokens, None)) };
    let any = SocketAddr::new(config.peer.listen.ip(), 0);
    let (name, endpoint) = become_admin(files, any, RENEWAL_CHECK, move |end| ends.note("console", end))?;
    Ok((tokens, Some(gather::Admin { name, nodes: Nodes::new(endpoint), audit: audit.clone() })))
}

/// The tokens for reading and for changing.
pub(super) fn tokens(config: &Config) -> Result<Tokens, ServeError> {
    let http = &config.http;
    Ok(Tokens {
        read: token(http.console_token_file.as_deref())?,
        admin: token(http.console_admin_token_file.as_deref())?,
    })
}

/// The files of the admin's certificate, if the console has an admin.
pub(super) fn admin_files(config: &Config) -> Option<CredentialFiles> {
    let http = &config.http;
    let (certificate, key) = http.console_admin_certificate.clone().zip(http.console_admin_key.clone())?;
    Some(CredentialFiles { ca: config.peer.ca.clone(), certificate, key })
}

/// The admin's certificate.
pub(super) fn load_admin(files: &CredentialFiles) -> Result<Credentials, ServeError> {
    let credentials = Credentials::load(files).map_err(ServeError::ConsoleCredentials)?;
    if credentials.identity().role != Role::Admin {
        return Err(ServeError::ConsoleAdmin);
    }
    Ok(credentials)
}

/// The tokenizers of models.
pub(crate) fn tokenizers(config: &Config) -> Result<Tokenizers, ServeError> {
    Tokenizers::start(config.http.console_tokenizers.clone()).map_err(ServeError::Tokenizers)
}

/// The admin's name and endpoint. The admin's files are checked at this interval, and used when they change; `expires` is told
/// the certificate's end.
fn become_admin(
    files: CredentialFiles,
    listen: SocketAddr,
    every: Duration,
    expires: impl Fn(Option<SystemTime>) + 'static,
) -> Result<(String, Endpoint), ServeError> {
    let credentials = load_admin(&files)?;
    let endpoint = Endpoint::bind(listen, &credentials, &TransportSettings::default())?;
    let name = credentials.identity().name.clone();
    let renewed = endpoint.clone();
    let renew = move |new: &Credentials| renewed.renew(new);
    actix_rt::spawn(renew_when_changed(files, credentials, every, renew, expires));
    Ok((name, endpoint))
}

fn token(file: Option<&Path>) -> Result<Token, ServeError> {
    let token = Token::new(file.map(Path::to_owned));
    let Some(path) = file else { return Ok(token) };
    let failed = |source| ServeError::Token { path: path.to_owned(), source };
    let text = token.read().map_err(|error| failed(Some(error)))?;
    if text.is_empty() { Err(failed(None)) } else { Ok(token) }
}

#[cfg(test)]
mod tests {
    use larder_net::quic::ca::{Authority, Validity};
    use larder_protocol::identity::Identity;

    use super::*;

    fn any() -> SocketAddr {
        ([127, 0, 0, 1], 0).into()
    }

    /// Another authority, and the files of an admin and of a node that it made.
    fn write(folder: &Path) -> [CredentialFiles; 2] {
        let (authority, files) = Authority::create(Validity::days(1)).unwrap();
        let ca = folder.join("ca.pem");
        std::fs::write(&ca, files.certificate_pem).unwrap();
        [(Role::Admin, "web"), (Role::Node, "n")].map(|(role, name)| {
            let issued = authority.issue(&Identity::new(role, name), Validity::days(1)).unwrap();
            let (certificate, key) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
            std::fs::write(&certificate, issued.certificate_pem).unwrap();
            std::fs::write(&key, issued.key_pem).unwrap();
            CredentialFiles { ca: ca.clone(), certificate, key }
        })
    }

    #[test]
    fn the_consoles_admin_takes_new_files_of_its_certificate() {
        actix_rt::System::new().block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let [files, _] = write(folder.path());
            let (name, admin) = become_admin(files, any(), Duration::from_millis(5), |_| {}).unwrap();
            assert_eq!(name, "web");
            let [_, files] = write(folder.path());
            let credentials = Credentials::load(&files).unwrap();
            let node = Endpoint::bind(any(), &credentials, &TransportSettings::default()).unwrap();
            let (accepting, address) = (node.clone(), node.local_address());
            actix_rt::spawn(async move {
                while let Some(incoming) = accepting.accept().await {
                    // Errors come as long as the admin has the certificate of the earlier authority.
                    drop(incoming.accept().await);
                }
            });
            // The node trusts the new authority alone, and so does the admin once it has its new files.
            let renewed = async {
                while admin.connect(address, Role::Node, Some("n")).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), renewed).await.expect("it connects");
        });
    }

    #[test]
    fn nobody_but_an_admin_changes_nodes_for_the_console() {
        actix_rt::System::new().block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let [_, files] = write(folder.path());
            let admin = become_admin(files, any(), RENEWAL_CHECK, |_| {});
            assert!(matches!(admin, Err(ServeError::ConsoleAdmin)));
        });
    }
}
