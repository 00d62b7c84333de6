//! QUIC between the processes of a cluster: mutual TLS, one set of transport settings, messages on streams.

pub mod ca;
mod credentials;
mod endpoint;
mod guests;
mod inspect;
mod messages;
mod port;
mod renewal;
mod settings;
mod socket;
mod steer;

pub use credentials::{CredentialFiles, Credentials, CredentialsError, Part};
pub use endpoint::{
    BindError, ConnectError, Connection, Endpoint, IdentityError, Incoming, NoVersion, Rejected,
};
pub(crate) use endpoint::{expect, identity_of};
pub use guests::{Asked, Guest, GuestLimits, Guests, Seat, TurnedAway, host_of};
pub(crate) use guests::{Counted, HANDSHAKE_DEADLINE};
pub use inspect::{InspectError, Inspected, inspect, inspect_pem};
pub use messages::{MessageError, read_message, write_encoded, write_message};
pub use port::PortShare;
pub use renewal::{EXPIRES_SOON, RENEWAL_CHECK, renew_when_changed};
pub use settings::{MAX_STREAMS, TransportSettings};
