//! `POST /console/tokens`: the tokens of a text, by the tokenizer of a model.
//!
//! The tokenizers stand in a folder. They are large, so one thread of the lowest priority keeps one of them in memory at a time,
//! and forgets it after a minute without requests.

use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, SystemTime};

use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};
use larder_net::http::in_pieces;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::HttpState;
use super::console::{harden, refuse_strangers};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// The body of a request to `POST /console/tokens`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokensRequest {
    /// The model, as its namespaces name it.
    model: String,
    /// The prompt as the engine gets it: after the chat template, if it uses one. At most 1 MiB.
    text: String,
    /// Whether the tokens with which the model's prompts begin are left out. A text from a chat template has these tokens
    /// already.
    #[serde(default)]
    without_special_tokens: bool,
}

/// The answer to `POST /console/tokens`.
#[derive(Debug, Serialize)]
struct TokensAnswer {
    /// The ids of the tokens.
    tokens: Vec<u32>,
}

/// The tokenizers of a folder.
pub(crate) struct Tokenizers(Option<SyncSender<Tokenization>>);

struct Tokenization {
    asked: TokensRequest,
    answer: oneshot::Sender<Result<Vec<u8>, Refused>>,
}

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
enum Refused {
    /// No folder is named.
    #[error(
        "the coordinator has no tokenizers: paste token ids, or name a folder as `console_tokenizers` in [http] of the coordinator's configuration, and put \
         each model's tokenizer.json at MODEL/tokenizer.json in it"
    )]
    NoFolder,
    /// A name that leads out of the folder.
    #[error("the model's name cannot be the name of a folder: paste token ids")]
    Name,
    /// The model has no tokenizer.
    #[error(
        "the coordinator has no tokenizer of this model: paste token ids, or put its tokenizer.json at {model}/tokenizer.json in the folder \
         that `console_tokenizers` in [http] of the coordinator's configuration names"
    )]
    NoModel {
        /// The model's folder.
        model: String,
    },
    /// Too many requests at a time.
    #[error("the coordinator tokenizes as many texts as it may: ask again in a moment")]
    Busy,
    /// The tokenizer fails.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The thread's state.
struct Work {
    folder: PathBuf,
    loaded: Option<Loaded>,
}

struct Loaded {
    path: PathBuf,
    modified: Option<SystemTime>,
    tokenizer: Tokenizer,
}

/// The tokens of a text.
pub(super) async fn answer(
    state: Data<HttpState>,
    request: HttpRequest,
    payload: Payload,
) -> actix_web::Result<HttpResponse> {
    if let Some(refused) = refuse_strangers(&state, &request) {
        return Ok(refused);
    }
    let body = state.bodies.read(&request, payload).await?;
    let read = |bytes: &[u8]| serde_json::from_slice(bytes).map_err(|error| format!("{error}\n"));
    let asked: TokensRequest = body.understand(move |bytes| read(&bytes)).await?;
    let mut response = match state.tokenizers.tokens(asked).await {
        Ok(json) => in_pieces("application/json", json),
        Err(Refused::Busy) => HttpResponse::ServiceUnavailable().body(format!("{}\n", Refused::Busy)),
        Err(refused) => HttpResponse::BadRequest().body(format!("{refused}\n")),
    };
    harden(response.headers_mut());
    Ok(response)
}

impl Tokenizers {
    /// The tokenizers of this folder, or none.
    ///
    /// # Errors
    /// The system gives no thread.
    pub(crate) fn start(folder: Option<PathBuf>) -> std::io::Result<Self> {
        let Some(folder) = folder else { return Ok(Self(None)) };
        let (queue, jobs) = sync_channel(WAITING);
        let work = Work { folder, loaded: None };
        std::thread::Builder::new().name("larder-tokens".into()).spawn(move || work.run(&jobs))?;
        Ok(Self(Some(queue)))
    }

    /// An answer in JSON.
    async fn tokens(&self, asked: TokensRequest) -> Result<Vec<u8>, Refused> {
        let queue = self.0.as_ref().ok_or(Refused::NoFolder)?;
        let (answer, answered) = oneshot::channel();
        queue.try_send(Tokenization { asked, answer }).map_err(|error| match error {
            TrySendError::Full(_) | TrySendError::Disconnected(_) => Refused::Busy,
        })?;
        let answered = timeout(DEADLINE, answered).await;
        answered.ok().and_then(Result::ok).unwrap_or(Err(Refused::Busy))
    }
}

impl Work {
    fn run(mut self, jobs: &Receiver<Tokenization>) {
        // After an error, the thread works at its old priority.
        let _ = rustix::process::nice(LOWEST_PRIORITY);
        loop {
            match jobs.recv_timeout(KEPT) {
                // Nobody waits for this answer any more.
                Ok(Tokenization { answer, .. }) if answer.is_closed() => {}
                Ok(Tokenization { asked, answer }) => {
                    // An error means that the user went away.
                    let _ = answer.send(self.json(&asked));
                }
                Err(RecvTimeoutError::Timeout) => self.loaded = None,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn json(&mut self, asked: &TokensRequest) -> Result<Vec<u8>, Refused> {
        let tokenizer = self.of_model(&asked.model)?;
        let tokens = tokenizer.tokens(&asked.text, !asked.without_special_tokens)?;
        // Numbers can always be written.
        Ok(serde_json::to_vec(&TokensAnswer { tokens }).unwrap_or_default())
    }

    /// A model's tokenizer, read again if its file has changed.
    fn of_model(&mut self, model: &str) -> Result<&Tokenizer, Refused> {
        let folder = folder_of(model).ok_or(Refused::Name)?;
        let path = self.folder.join(&folder).join("tokenizer.json");
        let Ok(metadata) = path.metadata() else {
            return Err(Refused::NoModel { model: folder.display().to_string() });
        };
        let modified = metadata.modified().ok();
        let kept = self.loaded.take().filter(|loaded| loaded.path == path && loaded.modified == modified);
        let loaded = match kept {
            Some(loaded) => loaded,
            // The other tokenizer has been dropped by now.
            None => Loaded { tokenizer: Tokenizer::read(&path)?, path, modified },
        };
        Ok(&self.loaded.insert(loaded).tokenizer)
    }
}

/// The folder of a model has the model's name. The name may be the path at which an engine found the model.
fn folder_of(model: &str) -> Option<PathBuf> {
    let path = Path::new(model.trim_start_matches('/'));
    let is_name = |part: Component<'_>| matches!(part, Component::Normal(_));
    let is_one = !path.as_os_str().is_empty() && model.len() <= MAX_MODEL_BYTES && !model.contains('\0');
    (is_one && path.components().all(is_name)).then(|| path.components().collect())
}

/// Texts that wait for their turn.
const WAITING: usize = 4;

/// Time for which a request waits for tokens.
const DEADLINE: Duration = Duration::from_secs(30);

/// Time for which an unused tokenizer stays in memory.
const KEPT: Duration = Duration::from_secs(60);

/// All other work goes first.
const LOWEST_PRIORITY: i32 = 19;

/// Most bytes of a model's name.
const MAX_MODEL_BYTES: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(model: &str) -> TokensRequest {
        TokensRequest { model: model.into(), text: "a".into(), without_special_tokens: false }
    }

    #[test]
    fn a_models_folder_is_never_outside() {
        let folder = |model| folder_of(model).map(|path| path.display().to_string());
        assert_eq!(folder("meta-llama/Llama-3-8B").as_deref(), Some("meta-llama/Llama-3-8B"));
        assert_eq!(folder("/models/qwen").as_deref(), Some("models/qwen"), "an engine found it there");
        assert_eq!(folder("a//b/./c").as_deref(), Some("a/b/c"));
        let long = "x".repeat(MAX_MODEL_BYTES + 1);
        for outside in ["", "/", "..", "../x", "a/../../x", "/../x", ".", "./a", "a\0b", &long] {
            assert_eq!(folder(outside), None, "{outside}");
        }
    }

    #[test]
    fn a_refusal_names_the_remedy() {
        let none = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let refused = |tokenizers: &Tokenizers, model: &str| {
            none.block_on(tokenizers.tokens(ask(model))).unwrap_err().to_string()
        };
        let without = Tokenizers::start(None).unwrap();
        assert!(refused(&without, "m").contains("name a folder as `console_tokenizers`"));
        let folder = tempfile::tempdir().unwrap();
        let with = Tokenizers::start(Some(folder.path().into())).unwrap();
        let said = refused(&with, "of/a-model");
        assert!(said.contains("put its tokenizer.json at of/a-model/tokenizer.json"), "{said}");
        assert!(
            !said.contains(&folder.path().display().to_string()),
            "the folder's place is nobody's business"
        );
        assert_eq!(
            refused(&with, "../etc"),
            "the model's name cannot be the name of a folder: paste token ids"
        );
        std::fs::create_dir(folder.path().join("m")).unwrap();
        std::fs::write(folder.path().join("m/tokenizer.json"), "garbage").unwrap();
        let said = refused(&with, "m");
        let expected = if cfg!(feature = "tokenizers") {
            "cannot read the tokenizer: "
        } else {
            "built without tokenizers"
        };
        assert!(said.contains(expected), "{said}");
    }

    #[test]
    fn a_question_without_a_thread_or_place_is_told_to_come_again() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (queue, jobs) = sync_channel(1);
        let tokenizers = Tokenizers(Some(queue));
        let (answer, _) = oneshot::channel();
        tokenizers.0.as_ref().unwrap().try_send(Tokenization { asked: ask("m"), answer }).unwrap();
        assert!(matches!(runtime.block_on(tokenizers.tokens(ask("m"))), Err(Refused::Busy)), "no place");
        drop(jobs);
        assert!(matches!(runtime.block_on(tokenizers.tokens(ask("m"))), Err(Refused::Busy)), "no thread");
    }
}
