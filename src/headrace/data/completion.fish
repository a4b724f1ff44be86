function __headrace_at
  set -l path (commandline -opc | string match -rv '^-')[2..]
  contains -- "$path[1..$argv[1]]" $argv[2..]
end
