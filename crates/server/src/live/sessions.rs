//! Which sessions there are, and what of each the cache still has: for the live view.
//!
//! A session at rest holds no block. What its next generation would find is in the prefix index, and that is what a
//! listener is told: ids, sizes and blocks; no token, no name, no salt. It is told of [`MOST`] sessions, those that were
//! used last, and again when anything about them has changed.
use crate::app::App;
use crate::sessions::Rest;
use futures_util::stream::{Stream, unfold};
use kvist_cache::{Content, GroupId};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sessions that are told of.
const MOST: usize = 64;
/// Between two looks.
const EVERY: Duration = Duration::from_millis(400);

#[derive(Serialize)]
struct Told {
    /// In the order in which they were made.
    sessions: Vec<Session>,
    /// How many there are beside these.
    more: usize,
}

#[derive(Serialize)]
struct Session {
    id: String,
    parent: Option<String>,
    tokens: usize,
    running: bool,
    /// Per layer group, the blocks that it would find; `null` behind a window. Empty while it runs: its sequence has them.
    tables: Vec<Vec<Option<u32>>>,
}

/// The state of all sessions as JSON: now, and whenever it has changed.
pub(crate) fn watch(app: Arc<App>) -> impl Stream<Item = String> {
    let begin = (app, String::new(), true);
    unfold(begin, |(app, before, first)| async move {
        let mut wait = !first;
        loop {
            if wait {
                tokio::time::sleep(EVERY).await;
            }
            wait = true;
            let now = look(&app).await?;
            if now != before {
                return Some((now.clone(), (app, now, false)));
            }
        }
    })
}

/// `None` when the engine has ended.
async fn look(app: &App) -> Option<String> {
    let (rests, more) = app.sessions.rests(Instant::now(), MOST);
    app.engine
        .inspect(move |state| {
            let cache = state.scheduler.cache();
            let groups = u16::try_from(cache.n_groups()).unwrap_or(u16::MAX);
            let session = |rest: Rest| {
                let content = Content::Tokens(&rest.tokens);
                let known = |group| cache.lookup_blocks(GroupId(group), &rest.salt, &content);
                Session {
                    id: rest.id.to_string(),
                    parent: rest.parent.map(|id| id.to_string()),
                    tokens: rest.tokens.len(),
                    running: rest.running,
                    tables: if rest.running { Vec::new() } else { (0..groups).map(known).collect() },
                }
            };
            let told = Told { sessions: rests.into_iter().map(session).collect(), more };
            serde_json::to_string(&told).unwrap_or_default()
        })
        .await
}
