//! What to do when the cache is full.
use kvist_cache::Refused;
use kvist_device::StepError;
use kvist_engine::Error;
use kvist_engine::chat::Chat;

/// The number of tokens in the cache, and its capacity.
pub fn in_use(chat: &Chat) -> (u32, u32) {
    let groups = chat.session().report();
    let fullest = groups.iter().max_by_key(|group| group.used_cells);
    fullest.map_or((0, 0), |group| (group.used_cells, group.capacity_cells))
}

/// The error of a turn. If the cache was full, it says how full and how to free space.
pub fn explained(error: Error, chat: &Chat, max_tokens: u32) -> anyhow::Error {
    match error {
        Error::PromptTooLong { tokens, context } => {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            anyhow::anyhow!(
                "the conversation with this turn has {tokens} tokens, and the cache holds {context}; the turn is \
                 not accepted: {}",
                ways_out(chat, tokens, max_tokens)
            )
        }
        Error::Step(StepError::Refused(Refused::NoSpace { .. })) => {
            let (used, capacity) = in_use(chat);
            anyhow::anyhow!(
                "the cache holds {capacity} tokens, of which {used} are in use, and this turn needs more than the \
                 rest; it is not accepted: {}",
                ways_out(chat, capacity, max_tokens)
            )
        }
        error => error.into(),
    }
}

/// Suggestions that make space for a conversation of `tokens` tokens.
pub fn ways_out(chat: &Chat, tokens: u32, max_tokens: u32) -> String {
    let mut ways = vec!["send a shorter message".to_string()];
    if !chat.current().messages.is_empty() {
        ways = vec!["/undo removes the last question and its answer".into()];
    }
    let current = &chat.current().name;
    let others: Vec<&str> =
        chat.branches().iter().map(|branch| branch.name.as_str()).filter(|name| name != current).collect();
    if !others.is_empty() {
        ways.push(format!("/switch continues in another branch, /drop deletes one ({})", others.join(", ")));
    } else if chat.session().config().kind_traits().many_sequences {
        ways.push("next time, /fork before a digression, so that you can return".into());
    }
    let enough = tokens.saturating_add(max_tokens).checked_next_power_of_two().unwrap_or(u32::MAX);
    let trained = chat.session().model().config().context;
    let beyond =
        if enough > trained { format!(" (the model was trained on {trained})") } else { String::new() };
    ways.push(format!("start again with --context {enough}{beyond}"));
    ways.push("or with --kind ring --window TOKENS, which never fills".into());
    ways.join("; ")
}
