"""What the workers made of the prompts, on its way to an update: fed, taken, logged, rewound."""
