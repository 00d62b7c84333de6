//! Makes a store of the `object_store` crate from options.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig};
use url::Url;

use super::patience::AskedPause;
use super::trouble::Trouble;
use super::{ObjectOptions, OpenError};
use crate::private;

/// A store, and the prefix of all names in it.
pub(super) type Opened = (Arc<dyn ObjectStore>, Path);

/// Sets up a builder: the environment, then the URL, then the settings, whose names must be known.
macro_rules! build {
    ($builder:expr, $store:literal, $options:expr, $pause:expr) => {{
        let options: &ObjectOptions = $options;
        let mut builder = $builder
            .with_url(&options.url)
            .with_client_options(client_options(options))
            .with_http_connector($pause.clone())
            .with_retry(RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: MOST_RETRIES,
                retry_timeout: options.deadline,
            });
        for (key, value) in &options.settings {
            let unknown = || OpenError::Setting { store: $store, key: key.clone() };
            let known = key.to_ascii_lowercase().parse().map_err(|_| unknown())?;
            builder = builder.with_config(known, value);
        }
        let reason = |error| Trouble::of(&error, "be set up").detail;
        let built = builder.build();
        built.map_err(|error| OpenError::Settings { url: options.url.clone(), reason: reason(error) })?
    }};
}

/// The kinds of store that a tier can be in.
pub(super) enum Kind {
    S3,
    Google,
    Azure,
    Folder(PathBuf),
}

/// A URL's kind of store and its prefix, if a tier can be in such a store.
pub(super) fn parse(url: &str) -> Option<(Kind, Path)> {
    let url = Url::parse(url).ok()?;
    let (scheme, prefix) = ObjectStoreScheme::parse(&url).ok()?;
    let kind = match scheme {
        ObjectStoreScheme::Local => Kind::Folder(url.to_file_path().ok()?),
        ObjectStoreScheme::AmazonS3 => Kind::S3,
        ObjectStoreScheme::GoogleCloudStorage => Kind::Google,
        ObjectStoreScheme::MicrosoftAzure => Kind::Azure,
        _ => return None,
    };
    Some((kind, prefix))
}

/// The first setting that a store of this URL does not have.
pub fn unknown_setting<'a>(url: &str, settings: &'a BTreeMap<String, String>) -> Option<&'a str> {
    let (kind, _) = parse(url)?;
    let is_known = |key: &&str| {
        let key = key.to_ascii_lowercase();
        match kind {
            Kind::S3 => key.parse::<AmazonS3ConfigKey>().is_ok(),
            Kind::Google => key.parse::<GoogleConfigKey>().is_ok(),
            Kind::Azure => key.parse::<AzureConfigKey>().is_ok(),
            Kind::Folder(_) => false,
        }
    };
    settings.keys().map(String::as_str).find(|key| !is_known(key))
}

/// The store that the options name, and that tells `pause` for how long it wants to be left alone. No request is made.
pub(super) fn open(options: &ObjectOptions, pause: &AskedPause) -> Result<Opened, OpenError> {
    // The HTTP client uses the process's crypto provider; a provider that is set already stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (kind, prefix) = parse(&options.url).ok_or_else(|| OpenError::Url(options.url.clone()))?;
    let store: Arc<dyn ObjectStore> = match kind {
        Kind::Folder(path) => return folder(path, options),
        Kind::S3 => {
            // Hashing each body twice more would cost more than sending it, and records have checksums of their own.
            let builder = AmazonS3Builder::from_env().with_unsigned_payload(true);
            Arc::new(build!(builder, "S3", options, pause))
        }
        Kind::Google => {
            Arc::new(build!(GoogleCloudStorageBuilder::from_env(), "Google Cloud Storage", options, pause))
        }
        Kind::Azure => Arc::new(build!(MicrosoftAzureBuilder::from_env(), "Azure", options, pause)),
    };
    Ok((store, prefix))
}

/// A store in a folder, which is made if missing. Writes are synced, as a store's answer promises.
fn folder(path: PathBuf, options: &ObjectOptions) -> Result<Opened, OpenError> {
    if let Some(key) = options.settings.keys().next() {
        return Err(OpenError::Setting { store: "local folder", key: key.clone() });
    }
    let failed = |source| OpenError::Folder { path: path.clone(), source };
    private::make_folder(&path).map_err(failed)?;
    if private::is_open_to_all(&path) {
        tracing::warn!(path = %path.display(), "every user of this machine can read the object tier's folder: remove this permission (chmod o=)");
    }
    let store = LocalFileSystem::new_with_prefix(&path);
    let store = store.map_err(|error| failed(std::io::Error::other(error)))?.with_fsync(true);
    Ok((Arc::new(store), Path::default()))
}

fn client_options(options: &ObjectOptions) -> ClientOptions {
    ClientOptions::new()
        .with_allow_http(options.allow_http)
        // The client of the tier limits the time of each request by its bytes.
        .with_timeout_disabled()
        .with_connect_timeout(options.timeout)
        .with_pool_max_idle_per_host(options.max_in_flight)
}

/// Retries of one request; its deadline mostly ends it earlier.
const MOST_RETRIES: usize = 5;
