//! An object store that hangs, always or at times: it accepts connections and does not answer.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;

use crate::s3::S3Server;

/// The store, on a thread of its own. Dropping it ends the thread.
pub(super) struct HangingStore {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    // Last: nobody speaks with the server any more.
    server: Option<S3Server>,
}

impl HangingStore {
    /// Starts the store. In front of a real store, if one is installed, it hangs every other `phase`; otherwise it always hangs.
    ///
    /// # Errors
    /// Fails if the store does not come up.
    pub(super) fn start(phase: Duration) -> anyhow::Result<Self> {
        let server = S3Server::start()?;
        let upstream = server.as_ref().map(|server| server.address().parse()).transpose()?;
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("store".into()).spawn(move || {
            let serving = LocalSet::new();
            let served = serving.run_until(async {
                tokio::select! {
                    () = serve(listener, upstream, phase) => {}
                    _ = stopped => {}
                }
            });
            runtime.block_on(served);
        })?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread), server })
    }

    /// Whether there is a real store behind this one.
    pub(super) fn is_real(&self) -> bool {
        self.server.is_some()
    }

    /// The part of a node's configuration that names the store.
    pub(super) fn config(&self) -> String {
        format!(
            "[object]\nurl = \"s3://larder/soak\"\nendpoint = \"http://{}\"\nallow_http = true\n\
             request_timeout_ms = 2000\nread_deadline_ms = 4000\n\
             settings = {{ region = \"us-east-1\", access_key_id = \"id\", secret_access_key = \"confidential\" }}\n",
            self.address
        )
    }
}

impl Drop for HangingStore {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // The thread has told of its panic already.
            let _ = thread.join();
        }
    }
}

async fn serve(listener: TcpListener, upstream: Option<SocketAddr>, phase: Duration) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let (hangs, is_hanging) = watch::channel(upstream.is_none());
    let changes = upstream.is_some();
    spawn_local(async move {
        loop {
            sleep(phase).await;
            hangs.send_modify(|hangs| *hangs ^= changes);
        }
    });
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let Ok((client, _)) = listener.accept().await else { continue };
        let is_hanging = is_hanging.clone();
        spawn_local(async move {
            pass(client, upstream, is_hanging).await;
            drop(permit);
        });
    }
}

/// Passes bytes on until the store hangs. Then keeps silent until the store serves again, and closes.
async fn pass(mut client: TcpStream, upstream: Option<SocketAddr>, mut is_hanging: watch::Receiver<bool>) {
    let passing = async {
        let Some(upstream) = upstream else { return std::future::pending().await };
        if let Ok(mut server) = TcpStream::connect(upstream).await {
            // Either side may close at any time.
            let _ = copy_bidirectional(&mut client, &mut server).await;
        }
    };
    let hangs = {
        let mut is_hanging = is_hanging.clone();
        async move { is_hanging.wait_for(|&hangs| hangs).await.is_ok() }
    };
    tokio::select! {
        biased;
        _ = hangs => {}
        () = passing => return,
    }
    let silence = is_hanging.wait_for(|&hangs| !hangs);
    let _ = tokio::time::timeout(LONGEST_SILENCE, silence).await;
}

/// Connections at a time; more wait to be accepted.
const MOST_CONNECTIONS: usize = 512;

/// Far longer than any client waits.
const LONGEST_SILENCE: Duration = Duration::from_secs(120);
