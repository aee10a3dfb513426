//! Tool support for models whose chat template does not know tools: the conversation says what a template
//! would.
//!
//! The functions are described in the system message, or in the first user message if the template takes no
//! system message, in the format of [`ToolFormat::Hermes`](super::ToolFormat::Hermes). Calls become text of
//! assistant messages and results become text of user messages, since such a template has no roles for them.
use serde_json::{Value, json};

/// The message that describes the functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    System,
    User,
}

/// Adds to the messages what a template would say about tools.
pub(crate) fn teach(messages: &[Value], tools: &[Value], place: Place) -> Vec<Value> {
    let mut taught: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut answered = false;
    for message in messages {
        let is_result = message["role"] == "tool";
        match (is_result, taught.last_mut()) {
            // Results of several calls are joined into one message, because roles alternate in such templates.
            (true, Some(last)) if answered => append(last, &result(message)),
            (true, _) => taught.push(json!({"role": "user", "content": result(message)})),
            (false, _) => taught.push(called(message)),
        }
        answered = is_result;
    }
    if tools.is_empty() {
        return taught;
    }
    let lesson = lesson(tools);
    let role = if place == Place::System { "system" } else { "user" };
    match taught.iter_mut().find(|message| message["role"] == role) {
        Some(message) if place == Place::System => append(message, &lesson),
        Some(message) => prepend(message, &lesson),
        None => taught.insert(0, json!({"role": role, "content": lesson})),
    }
    taught
}

fn lesson(tools: &[Value]) -> String {
    let described: String = tools.iter().map(|tool| format!("{tool}\n")).collect();
    format!(
        "You can call functions. Each of these lines describes one, its parameters by a JSON schema:\n\
         <tools>\n{described}</tools>\n\
         To call a function, answer with its name and arguments as JSON, like this:\n\
         <tool_call>\n{{\"name\": \"the function's name\", \"arguments\": {{\"a parameter\": \"its value\"}}}}\n</tool_call>\n\
         Its result follows within <tool_response></tool_response>. Call a function only if you need it."
    )
}

/// Moves a message's calls into its text.
fn called(message: &Value) -> Value {
    let mut message = message.clone();
    let Some(fields) = message.as_object_mut() else { return message };
    let Some(Value::Array(calls)) = fields.remove("tool_calls") else { return message };
    let calls = calls.iter().map(|call| {
        let function = &call["function"];
        // In the API the arguments are a string that contains JSON.
        let arguments = match &function["arguments"] {
            Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
            arguments => arguments.clone(),
        };
        let call = json!({"name": function["name"], "arguments": arguments});
        format!("<tool_call>\n{call}\n</tool_call>")
    });
    let calls = calls.collect::<Vec<_>>().join("\n");
    append(&mut message, &calls);
    message
}

fn result(message: &Value) -> String {
    format!("<tool_response>\n{}\n</tool_response>", text_of(&message["content"]))
}

fn text_of(content: &Value) -> String {
    match content {
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        content => content.as_str().unwrap_or_default().to_string(),
    }
}

/// Appends to a message's text. Content in parts becomes one text.
fn append(message: &mut Value, more: &str) {
    let text = text_of(&message["content"]);
    let between = if text.is_empty() { "" } else { "\n\n" };
    message["content"] = format!("{text}{between}{more}").into();
}

fn prepend(message: &mut Value, before: &str) {
    message["content"] = format!("{before}\n\n{}", text_of(&message["content"])).into();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn functions_are_described_once_and_where_they_may() {
        let tools = [json!({"type": "function", "function": {"name": "now"}})];
        let described = r#"{"type":"function","function":{"name":"now"}}"#;
        for (messages, place, at, begins, ends) in [
            (vec![said("user", "Hi")], Place::System, 0, "You can call", "if you need it."),
            (
                vec![said("system", "Be brief."), said("user", "Hi")],
                Place::System,
                0,
                "Be brief.\n\nYou can",
                "need it.",
            ),
            (vec![said("user", "Hi"), said("assistant", "Yes?")], Place::User, 0, "You can call", "\n\nHi"),
            (vec![said("system", "S"), said("user", "Hi")], Place::User, 1, "You can call", "\n\nHi"),
        ] {
            let taught = teach(&messages, &tools, place);
            let content = taught[at]["content"].as_str().unwrap();
            assert!(content.starts_with(begins) && content.ends_with(ends), "{content}");
            let all: String = taught.iter().filter_map(|message| message["content"].as_str()).collect();
            assert_eq!(all.matches(described).count(), 1, "{taught:?}");
            assert!(taught.len() >= messages.len());
            // Without tools nothing is added.
            assert_eq!(teach(&messages, &[], place), messages);
        }
    }

    #[test]
    fn calls_and_results_are_texts() {
        let messages = [
            said("user", "Two cities."),
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "function": {"name": "weather", "arguments": "{\"in\": \"Rome\"}"}},
                {"id": "2", "function": {"name": "weather", "arguments": "not JSON"}},
            ]}),
            json!({"role": "tool", "tool_call_id": "1", "content": "sun"}),
            json!({"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "rain"}]}),
            said("assistant", "Sun and rain."),
        ];
        let taught = teach(&messages, &[], Place::System);
        let expected = [
            said("user", "Two cities."),
            said(
                "assistant",
                "<tool_call>\n{\"name\":\"weather\",\"arguments\":{\"in\":\"Rome\"}}\n</tool_call>\n\
                 <tool_call>\n{\"name\":\"weather\",\"arguments\":\"not JSON\"}\n</tool_call>",
            ),
            said("user", "<tool_response>\nsun\n</tool_response>\n\n<tool_response>\nrain\n</tool_response>"),
            said("assistant", "Sun and rain."),
        ];
        assert_eq!(taught, expected);
    }
}
