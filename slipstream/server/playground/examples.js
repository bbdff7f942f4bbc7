// Prompts to start with: from much that repeats to nothing that does.

export const EXAMPLES = [
  { title: "Write a Python class", prompt: "Write a Python class for a stack with push, pop and peek." },
  {
    title: "Correct a letter",
    prompt: `Correct the spelling mistakes in this text:

Thank you for visiting our labratory last Tuesday. The instruments that you asked about will be deliverd to your office \
before the end of the month. Please let us know whether the second floor entrance is open on weekends.`,
  },
  { title: "Tell a story", prompt: "Write a short story about a lighthouse keeper who finds a message in a bottle." },
  { title: "Why is the sky blue?", prompt: "Why is the sky blue?" },
];
